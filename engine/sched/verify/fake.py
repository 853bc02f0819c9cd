"""Workers without a model.

``DigestWorker`` stores in each KV slot a 64-bit digest of the whole prefix and reads it back
through the block table, so a wrong block, a stale slot or a missed cache key becomes a wrong token.
``CountingWorker`` only answers quickly, to time what surrounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.messages.step import NewSeq, StepPlan, StepResult

MASK = (1 << 64) - 1
EMPTY_DIGEST = 0x9E3779B97F4A7C15


def mix(digest: int, token: int) -> int:
    """Digest of a prefix with one more token (a multiply-xorshift step on 64 bits)."""
    digest = (digest ^ (token + 0x165667B19E3779F9)) * 0xBF58476D1CE4E5B9 & MASK
    return digest ^ (digest >> 29)


def digest_of(tokens: list[int]) -> int:
    """Digest of a whole sequence."""
    digest = EMPTY_DIGEST
    for token in tokens:
        digest = mix(digest, token)
    return digest


def token_after(tokens: list[int], vocab_size: int = 1000) -> int:
    """What the fake model says next."""
    return digest_of(tokens) % vocab_size


@dataclass(slots=True)
class FakeSeq:
    """A live sequence of the fake worker."""

    tokens: list[int]
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)  # by group and table index
    digests: list[int] = field(default_factory=list)  # of its prefixes, to check windows against

    def digest_at(self, position: int) -> int:
        """What every group should hold at this position."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else EMPTY_DIGEST
            self.digests.append(mix(before, self.tokens[len(self.digests)]))
        return self.digests[position]


class DigestWorker:
    """An executor (``launch``/``collect``) whose next token proves that the right KV was read.

    ``windows``: of each group of layers, 0 for full attention. A group with a window is read at
    both ends of it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        windows: Sequence[int] = (0,),
        fail: Callable[[NewSeq, int], str | None] = lambda seq, position: None,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kv = [[0] * block_size for _ in range(num_blocks)]
        self.windows = windows
        self.seqs: dict[int, FakeSeq] = {}
        self._new: dict[int, NewSeq] = {}
        self._fail = fail

    def launch(self, plan: StepPlan) -> StepResult:
        """Compute the step; the result waits to be collected."""
        self._apply(plan)
        tokens: list[int] = []
        counts = np.zeros(len(plan.rows), dtype=np.int32)
        errors: dict[int, str] = {}
        columns = zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
        for index, (slot, start, count, samples) in enumerate(columns):
            seq = self.seqs[int(slot)]
            digest = self._compute(seq, int(start), int(count))
            message = self._fail(self._new[int(slot)], int(start + count))
            if message:
                errors[index] = message
            if samples:
                token = digest % self.vocab_size
                seq.tokens.append(token)  # a step in flight behind a failure reads it too
                if not message:
                    tokens.append(token)
                    counts[index] = 1
        return StepResult(plan.step, np.array(tokens, dtype=np.int32), counts, errors)

    def collect(self, result: StepResult) -> StepResult:
        """Wait for a launched step."""
        return result

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            del self.seqs[slot]
        for new in plan.new:
            assert new.slot not in self.seqs, f"slot {new.slot} is taken"
            self.seqs[new.slot] = FakeSeq(list(new.token_ids))
            self._new[new.slot] = new
        groups = np.zeros_like(plan.block_ids) if plan.block_groups is None else plan.block_groups
        deltas = zip(plan.block_slots, groups, plan.block_indices, plan.block_ids, strict=True)
        for slot, group, index, block in deltas:
            self.seqs[int(slot)].blocks[int(group), int(index)] = int(block)

    def _compute(self, seq: FakeSeq, start: int, count: int) -> int:
        digest = self._attend(seq, start - 1) if start else EMPTY_DIGEST
        for position in range(start, start + count):
            digest = mix(digest, seq.tokens[position])
            index, offset = divmod(position, self.block_size)
            for group in range(len(self.windows)):
                self.kv[seq.blocks[group, index]][offset] = digest
        return digest

    def _attend(self, seq: FakeSeq, last: int) -> int:
        """The digest at the last position; wrong if a window does not hold what it should."""
        digest = self._read(seq, 0, last)
        for group, window in enumerate(self.windows):
            ends = {max(0, last - window + 2), last} if window else ()
            for position in ends:
                digest ^= self._read(seq, group, position) ^ seq.digest_at(position)
        return digest

    def _read(self, seq: FakeSeq, group: int, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        return self.kv[seq.blocks[group, index]][offset]


class CountingWorker:
    """Answers every row that samples with the same token, at no cost."""

    def __init__(self, token: int = 7) -> None:
        self.token = token

    def launch(self, plan: StepPlan) -> StepResult:
        num = int(plan.samples.sum())
        return StepResult(plan.step, np.full(num, self.token, dtype=np.int32), plan.samples)

    def collect(self, result: StepResult) -> StepResult:
        return result
