"""Workers without a model.

``DigestWorker`` stores in each KV slot a hash of the whole prefix and reads it back through the
block table, so a wrong KV block shows as a wrong token. ``LateWorker`` also computes each step only
when its result is collected, as an asynchronous device may. ``CountingWorker`` costs almost no
time, for measurements of the code around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.messages.pooling import PoolingParams
from engine.messages.step import (
    EMPTY,
    PARTS,
    Column,
    DraftPart,
    Masks,
    NewSeq,
    StepPlan,
    StepResult,
    check_parts,
)
from engine.messages.vectors import PooledPart, Vectors
from engine.worker.rank_times import Waited
from policylab.verify.fake_states import ZERO_STATE, FakeStates, StateStep

MASK = (1 << 64) - 1
EMPTY_DIGEST = 0x9E3779B97F4A7C15
RUBBISH = 0x5EED


def mix(digest: int, token: int) -> int:
    """Extend the 64-bit digest of a prefix by one token (multiply and xorshift)."""
    digest = (digest ^ (token + 0x165667B19E3779F9)) * 0xBF58476D1CE4E5B9 & MASK
    return digest ^ (digest >> 29)


def digest_of(tokens: Sequence[int]) -> int:
    """The 64-bit digest of a sequence of tokens."""
    digest = EMPTY_DIGEST
    for token in tokens:
        digest = mix(digest, token)
    return digest


NONE_LEFT = -1  # in place of a token, if the mask allows none


def token_after(tokens: Sequence[int], vocab_size: int = 1000) -> int:
    """The token that the fake model generates after this sequence of tokens."""
    return digest_of(tokens) % vocab_size


def as_floats(digests: Sequence[int]) -> Vectors:
    """Two numbers for each digest that float32 represents exactly, [digests, 2]."""
    halves = [(digest & 0xFFFFFF, digest >> 24 & 0xFFFFFF) for digest in digests]
    return np.array(halves, dtype=np.float32)


def pooled_after(tokens: Sequence[int], params: PoolingParams) -> Vectors:
    """The result of the fake model for a pooled request with these tokens."""
    if not params.is_by_token:
        return as_floats([digest_of(tokens)]).reshape(-1)
    return as_floats([digest_of(tokens[: at + 1]) for at in range(len(tokens))])


@dataclass(slots=True)
class FakeSeq:
    """A running sequence in the fake worker: its tokens, and a block table for each group of
    layers."""

    tokens: list[int]
    tables: list[list[int]]  # block tables, one per group
    digests: list[int] = field(default_factory=list)  # digests of its prefixes, to check windows
    states: list[int] = field(default_factory=list)  # states after its prefixes, to check states
    computed: list[int] = field(default_factory=list)  # digests that its own steps have computed

    def digest_at(self, position: int) -> int:
        """The digest that the KV at this position should hold, in all groups of layers."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else EMPTY_DIGEST
            self.digests.append(mix(before, self.tokens[len(self.digests)]))
        return self.digests[position]

    def state_after(self, num_tokens: int) -> int:
        """The state that layers with states should have after this many tokens."""
        while len(self.states) <= num_tokens:
            last = mix(self.states[-1], self.tokens[len(self.states) - 1]) if self.states else None
            self.states.append(ZERO_STATE if last is None else last)
        return self.states[num_tokens]


class FakeExecutor:
    """Base class of executors without a model."""

    capabilities = frozenset([*PARTS, "pooling"]) - {"masks"}
    methods: tuple[str, ...] = ()

    def preview(self, ticket: Any) -> Column | None:
        """Always ``None``: no token is known before sampling."""
        return None

    def sample(self, ticket: Any, masks: Masks | None) -> None:
        """Always raises ``AssertionError``: this worker samples when a step is launched."""
        raise AssertionError(f"{type(self).__name__} samples when it launches a step")

    def call(self, name: str, *args: Any) -> Any:
        """Always raises ``ConfigError``: this worker has no methods to call."""
        raise ConfigError(f"{name} is not available: {type(self).__name__} has no model")

    def check(self) -> None:
        """Nothing to notice of other ranks."""

    def waited(self) -> Waited:
        """Nothing: it waits for nobody."""
        return Waited()

    def shutdown(self) -> None:
        """Nothing to release."""


class FakeWork(NamedTuple):
    """What a request computes in a step."""

    seq: FakeSeq
    new: NewSeq
    start: int
    num_tokens: int
    samples: bool
    drafts: Sequence[int]


class Computed(NamedTuple):
    """What a request's forward pass computed. ``digests``: the digest of the sequence up to its
    last known token, then up to each draft token."""

    work: FakeWork
    digests: list[int]
    error: str | None


class DigestWorker(FakeExecutor):
    """An executor that generates a wrong token if the wrong KV was read.

    The KV of each position holds a digest of the prefix, from which the next token follows.
    ``windows``: of each group of layers, see ``Setup.windows``. ``content(new)`` returns
    what the model sees at each position of a new sequence: the token, with salt, adapter and media.
    ``fail(new, upto)`` returns an error message if computing the positions before ``upto`` should
    fail. With a token mask, the next allowed token is taken.

    ``carry_out``, called before a plan is computed, executes its orders to stores; ``begin_loads``
    is called after the plan's snapshots of states were read; ``answers`` are further methods that
    can be called by name; ``offer`` proposes draft tokens for
    the next step. ``keep_states`` gives the model recurrent states."""

    capabilities = frozenset([*PARTS, "pooling"])

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        windows: Sequence[int] = (0,),
        fail: Callable[[NewSeq, int], str | None] = lambda seq, position: None,
        content: Callable[[NewSeq], list[int]] = lambda seq: list(seq.token_ids),
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.windows = windows
        self.kv = [[0] * block_size for _ in range(num_blocks)]
        self.states: FakeStates | None = None
        self.seqs: dict[int, FakeSeq] = {}
        self._new: dict[int, NewSeq] = {}
        self.carry_out: Callable[[StepPlan], None] = lambda plan: None
        self.begin_loads: Callable[[], None] = lambda: None
        self.answers: Mapping[str, Callable[..., Any]] = {}
        self.offer: Callable[[StepPlan, Sequence[Computed]], DraftPart | None]
        self.offer = lambda plan, rows: None
        self._fail = fail
        self._content = content
        self._waiting: tuple[StepPlan, list[Computed]] | None = (
            None  # the step that waits for masks
        )

    def keep_states(
        self,
        most_drafts: int = 0,
        loses: Callable[[int, int], bool] = lambda step, index: False,
    ) -> None:
        """Give the model recurrent states, from which the next token also follows.
        ``most_drafts``: of a row; ``loses(step, index)``: True if a snapshot cannot be saved."""
        self.states = FakeStates(self.kv, most_drafts + 2, loses)

    def launch(self, plan: StepPlan) -> StepResult:
        """Compute the step. If its plan has masks, its tokens are sampled later, by ``sample``."""
        assert self._waiting is None, "a step is launched while another waits for masks"
        work, result = self._work(plan), StepResult(plan.step, EMPTY, EMPTY)
        rows = self._forward(plan, work)
        if plan.masks is None:
            self._finish(plan, rows, None, result)
        else:
            self._waiting = (plan, rows)
        return result

    def preview(self, ticket: StepResult) -> Column | None:
        """Return the token that each row in ``plan.masks.ahead`` would sample without a mask; -1
        for about half of the rows, whose token counts as not known yet."""
        assert self._waiting is not None, "no step waits for masks"
        plan, rows = self._waiting
        assert plan.masks is not None and plan.masks.ahead is not None
        drawn = []
        for index in plan.masks.ahead.tolist():
            (work, digests, error) = rows[index]
            can_tell = not (work.drafts or error) and digests[0] >> 20 & 1
            drawn.append(digests[0] % self.vocab_size if can_tell else -1)
        return np.array(drawn, dtype=np.int32)

    def sample(self, ticket: StepResult, masks: Masks | None) -> None:
        assert self._waiting is not None and masks is not None, "no step waits, or no masks"
        (plan, rows), self._waiting = self._waiting, None
        self._finish(plan, rows, masks, ticket)

    def collect(self, ticket: StepResult) -> StepResult:
        """The result of a launched step."""
        return ticket

    def call(self, name: str, *args: Any) -> Any:
        """Call one of ``answers``."""
        return self.answers[name](*args)

    def _finish(
        self, plan: StepPlan, rows: list[Computed], masks: Masks | None, result: StepResult
    ) -> None:
        """Sample the tokens of a computed step and store them in ``result``."""
        of_row: list[list[NDArray[np.int32]]] = [[] for _ in rows]
        if plan.masks is not None:
            assert masks is not None, "the masks of a step are missing"
            unread = iter(masks.words.reshape(-1, masks.words_a_mask))
            masked = plan.masks.rows if masks.rows is None else masks.rows
            for index in masked.tolist():
                of_row[index] = [next(unread) for _ in rows[index].digests]
            assert next(unread, None) is None, "there are more masks than sampled tokens"
        self.draw(rows, of_row, result)
        if self.states is not None:
            self.states.save(plan, result)
        offered = self.offer(plan, rows)
        if offered is not None:
            result.drafts = offered

    def _work(self, plan: StepPlan) -> list[FakeWork]:
        """Apply a plan to the worker's sequences; returns what each row of the batch computes."""
        check_parts(plan, self.capabilities)
        self.apply(plan)
        drafts = draft_rows(plan)
        columns = zip(
            plan.slots.tolist(),
            plan.starts.tolist(),
            plan.counts.tolist(),
            plan.samples.tolist(),
            strict=True,
        )
        return [
            FakeWork(
                self.seqs[slot],
                self._new[slot],
                start,
                count,
                bool(samples),
                drafts[index] if drafts else (),
            )
            for index, (slot, start, count, samples) in enumerate(columns)
        ]

    def _forward(self, plan: StepPlan, work: Sequence[FakeWork]) -> list[Computed]:
        """Execute the transfers of a plan, then write the KV of all rows of the batch; returns the
        digests of each row."""
        self.carry_out(plan)
        if self.states is not None:
            self.states.begin(plan)
        self.begin_loads()
        rows = []
        for row in work:
            first_draft = row.start + row.num_tokens - len(row.drafts)
            digest = self._compute(row.seq, row.start, first_draft - row.start)
            if self.states is not None:
                fault = digest ^ row.seq.digest_at(first_draft - 1)
                digest ^= self._compute_states(self.states, row, fault)
            digests = self._compute_drafts(row.seq, first_draft, digest, row.drafts)
            error = self._fail(row.new, row.start + row.num_tokens)
            if error:
                self._spoil(row)
            rows.append(Computed(row, digests, error))
        return rows

    def draw(
        self, rows: list[Computed], masks: list[list[NDArray[np.int32]]], result: StepResult
    ) -> None:
        """Sample tokens, verify drafts, and store the tokens in ``result``. ``masks``: for each row
        of the batch, the mask of the next token and those after each draft; [] if unmasked."""
        tokens: list[int] = []
        counts = [0] * len(rows)
        results: list[tuple[int, Vectors]] = []
        for index, ((work, digests, error), own) in enumerate(zip(rows, masks, strict=True)):
            if error:
                result.fail(index, error)
            step = StateStep(work.new.slot, work.num_tokens, len(work.drafts))
            if not work.samples or work.new.pooling is not None:
                if self.states is not None:
                    self.states.advance(step, 1)
                if work.samples and not error:
                    results.append((index, self._pooled(work, digests[0])))
                continue
            drawn = [digest % self.vocab_size for digest in digests]
            if own:
                drawn = [allowed(token, mask) for token, mask in zip(drawn, own, strict=True)]
            sampled = standing(drawn, work.drafts)
            if NONE_LEFT in sampled and not error:
                error = "no token is left: the mask, as of a grammar, allows none"
                result.fail(index, error, "no_token_is_allowed")
            if self.states is not None:
                self.states.advance(step, len(sampled))
            work.seq.tokens += sampled  # a later step in flight reads them even after a failure
            if not error:
                tokens += sampled
                counts[index] = len(sampled)
        result.token_ids = np.array(tokens, dtype=np.int32)
        result.counts = np.array(counts, dtype=np.int32)
        result.pooled = PooledPart.of(results) if results else None

    def _pooled(self, work: FakeWork, digest: int) -> Vectors:
        """The result of a pooled request, see ``pooled_after``."""
        assert work.new.pooling is not None
        if not work.new.pooling.is_by_token:
            return as_floats([digest]).reshape(-1)
        return as_floats(work.seq.computed)

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            del self.seqs[slot]
        for new in plan.new:
            assert new.slot not in self.seqs, f"slot {new.slot} is taken"
            self.seqs[new.slot] = FakeSeq(self._content(new), [[] for _ in self.windows])
            self._new[new.slot] = new
        if not plan.block_ids.size:
            return
        groups = plan.block_groups.tolist() if plan.block_groups is not None else repeat(0)
        deltas = zip(plan.block_slots.tolist(), groups, plan.block_indices.tolist(), strict=False)
        for (slot, group, index), block in zip(deltas, plan.block_ids.tolist(), strict=True):
            table = self.seqs[slot].tables[group]
            if index == len(table):
                table.append(block)
            else:
                assert table[index] != block, f"slot {slot} gets block {block} again"
                table[index] = block

    def _compute(self, seq: FakeSeq, start: int, count: int) -> int:
        """Write the KV of ``count`` tokens from position ``start``; returns the digest after the
        last one."""
        digest = self._attend(seq, start - 1) if start else EMPTY_DIGEST
        del seq.computed[start:]
        for position in range(start, start + count):
            digest = mix(digest, seq.tokens[position])
            seq.computed.append(digest)
            self._write(seq, position, digest)
        return digest

    def _compute_drafts(
        self, seq: FakeSeq, start: int, digest: int, drafts: Sequence[int]
    ) -> list[int]:
        """Write the KV of draft tokens from position ``start`` on. ``digest``: digest of the
        prefix. Returns it, followed by the digest after each draft."""
        digests = [digest]
        if drafts:
            digest = self._read(seq, 0, start - 1)
        for position, draft in enumerate(drafts, start):
            digest = mix(digest, draft)
            self._write(seq, position, digest)
            digests.append(digest)
        return digests

    def _spoil(self, row: FakeWork) -> None:
        for position in range(row.start, row.start + row.num_tokens):
            self._write(row.seq, position, RUBBISH)
        if self.states is not None:
            self.states.write(row.new.slot, [RUBBISH] * (len(row.drafts) + 1))

    def _compute_states(self, states: FakeStates, row: FakeWork, fault: int) -> int:
        """Compute the states of a row from the one that its slot has. Returns 0 if that one was
        right, any other number if it was not. ``fault``: not 0 if the row read wrong KV, which
        makes its states wrong too."""
        before = state = states.read(row.new.slot)
        state ^= fault
        first_draft = row.start + row.num_tokens - len(row.drafts)
        for position in range(row.start, first_draft):
            state = mix(state, row.seq.tokens[position])
        written = [state]
        for draft in row.drafts:
            written.append(mix(written[-1], draft))
        states.write(row.new.slot, written)
        return before ^ row.seq.state_after(row.start)

    def _attend(self, seq: FakeSeq, last: int) -> int:
        """Return the digest stored at position ``last`` of the KV cache; a wrong one if the KV
        there, at the start of a window or at a random position is not as expected."""
        digest = self._read(seq, 0, last)
        for group, window in enumerate(self.windows):
            any_one = mix(last, len(seq.tokens)) % (last + 1)
            first = first_seen(last + 1, window)  # above ``last`` if the next token begins a chunk
            read = {first, last} if first <= last else set()
            for position in read if window else {any_one}:
                digest ^= self._read(seq, group, position) ^ seq.digest_at(position)
        return digest

    def _write(self, seq: FakeSeq, position: int, digest: int) -> None:
        index, offset = divmod(position, self.block_size)
        for table in seq.tables:
            self.kv[table[index]][offset] = digest

    def _read(self, seq: FakeSeq, group: int, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        return self.kv[seq.tables[group][index]][offset]


def first_seen(position: int, window: int) -> int:
    """The first position whose key a query at ``position`` reads; for ``window`` see
    ``Setup.windows``."""
    if window < 0:
        return position // -window * -window
    return max(0, position - window + 1) if window else 0


def allowed(token: int, mask: NDArray[np.int32]) -> int:
    """The first token that the mask allows, counting up cyclically from ``token``; ``NONE_LEFT`` if
    the mask allows none."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    if not bits.any():
        return NONE_LEFT
    return int(np.flatnonzero(np.roll(bits, -token))[0] + token) % len(bits)


def standing(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The verified tokens: drafts up to the first that differs from the sampled tokens ``drawn``,
    then the sampled token, unless it is ``NONE_LEFT`` after a right draft."""
    num_right = 0
    while num_right < len(drafts) and drafts[num_right] == drawn[num_right] != NONE_LEFT:
        num_right += 1
    if num_right and drawn[num_right] == NONE_LEFT:
        return list(drawn[:num_right])
    return list(drawn[: num_right + 1])


def draft_rows(plan: StepPlan) -> list[list[int]]:
    """The draft tokens of a plan, one list for each row of the batch; [] if it has no drafts."""
    return [] if plan.drafts is None else plan.drafts.by_row()


class LateWorker(DigestWorker):
    """A worker that computes a step only when its result is collected, as a busy device may do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._launched: deque[tuple[list[FakeWork], StepResult, StepPlan]] = deque()
        self._masks: dict[int, Masks] = {}  # by step, for steps not yet collected

    def launch(self, plan: StepPlan) -> StepResult:
        """Apply the plan to the block tables; returns an empty result, which ``collect`` fills
        in."""
        work = [
            row._replace(seq=replace(row.seq, tables=[table[:] for table in row.seq.tables]))
            for row in self._work(plan)
        ]
        result = StepResult(plan.step, EMPTY, EMPTY)
        self._launched.append((work, result, plan))
        return result

    def preview(self, ticket: StepResult) -> Column | None:
        """Always ``None``: no token is known before the step is collected."""
        return None

    def sample(self, ticket: StepResult, masks: Masks | None) -> None:
        """Store the masks; the step is sampled when it is collected."""
        assert masks is not None, "the masks of a waiting step are missing"
        self._masks[ticket.step] = masks

    def collect(self, ticket: StepResult) -> StepResult:
        """Compute the oldest step and return its result."""
        work, due, plan = self._launched.popleft()
        assert due is ticket, "steps are not collected in the order of their launch"
        self._finish(plan, self._forward(plan, work), self._masks.pop(plan.step, None), due)
        return due


class CountingWorker(FakeExecutor):
    """Returns the same token for every row that samples, at almost no cost."""

    capabilities = FakeExecutor.capabilities - {"pooling"}

    def __init__(self, token: int = 7) -> None:
        self.token = token

    def launch(self, plan: StepPlan) -> StepResult:
        num = int(plan.samples.sum())
        return StepResult(plan.step, np.full(num, self.token, dtype=np.int32), plan.samples)

    def collect(self, ticket: Any) -> StepResult:
        result: StepResult = ticket
        return result
