"""Recurrent states of the fake model: a digest of all tokens so far for each running sequence.

They are kept as the real worker keeps them: in several copies for each slot. A step reads one copy
and writes the others; which copy is valid is a number for each slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from engine.messages.step import SnapshotPart, StepPlan, StepResult

ZERO_STATE = 0x27D4EB2F165667C5
WRONG_STATE = 0xBAD


class StateStep(NamedTuple):
    """What a row's forward pass did to its state. ``num_tokens``, ``num_drafts``: that it
    computed."""

    slot: int
    num_tokens: int
    num_drafts: int


class FakeStates:
    """The states of all slots, each in ``num_copies`` copies: one more than the largest number of
    states that a step writes. ``kv``: the contents of the blocks of the pool, which snapshots are
    stored in. ``is_lost(step, index)``: True if saving a snapshot fails."""

    def __init__(
        self, kv: list[list[int]], num_copies: int, is_lost: Callable[[int, int], bool]
    ) -> None:
        self.num_copies = num_copies
        self._kv = kv
        self._is_lost = is_lost
        self._values: dict[int, list[int]] = {}  # by slot: the copies of its state
        self._copy: dict[int, int] = {}  # by slot: index of the valid copy
        self._computed: dict[int, int] = {}  # by slot: number of tokens in the valid copy

    def begin(self, plan: StepPlan) -> None:
        """Enter the new sequences of a plan, and load their snapshots."""
        starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        for new in plan.new:
            self._computed[new.slot] = starts[new.slot]
            self._copy.setdefault(new.slot, 0)
            self._values.setdefault(new.slot, [WRONG_STATE] * self.num_copies)
        part = plan.snapshots
        if part is None:
            return
        for slot, blocks in zip(
            part.load_slots.tolist(), _parts(part.load_blocks, part), strict=True
        ):
            self._copy[slot] = 0
            self._values[slot][0] = self._loaded(blocks)

    def read(self, slot: int) -> int:
        """The state of a slot before its next token."""
        return self._values[slot][self._copy[slot]] if self._computed[slot] else ZERO_STATE

    def write(self, slot: int, states: Sequence[int]) -> None:
        """Store the states after the token before the drafts and after each draft."""
        for place, state in enumerate(states):
            self._values[slot][(self._copy[slot] + 1 + place) % self.num_copies] = state

    def advance(self, step: StateStep, num_kept: int) -> None:
        """Make the state after ``num_kept`` of the states that a step wrote the valid one."""
        self._computed[step.slot] += step.num_tokens - step.num_drafts - 1 + num_kept
        self._copy[step.slot] = (self._copy[step.slot] + num_kept) % self.num_copies

    def save(self, plan: StepPlan, result: StepResult) -> None:
        """Save the snapshots of a plan whose rows have advanced. Those that fail are entered into
        ``result``."""
        part = plan.snapshots
        if part is None or not part.save_slots.size:
            return
        lost = []
        wanted = zip(part.save_slots.tolist(), part.save_lengths.tolist(), strict=True)
        blocks_of = _parts(part.save_blocks, part)
        for index, ((slot, length), blocks) in enumerate(zip(wanted, blocks_of, strict=True)):
            num_back = self._computed[slot] - length
            if self._is_lost(plan.step, index):
                lost.append(index)
            elif num_back >= 0:  # else its last tokens are rejected drafts
                assert num_back < self.num_copies - 1, f"slot {slot} has no state at {length}"
                state = self._values[slot][(self._copy[slot] - num_back) % self.num_copies]
                for place, block in enumerate(blocks):
                    self._kv[block][:] = [state ^ place] * len(self._kv[block])
        result.lost_snapshots = np.array(lost, dtype=np.int32) if lost else None

    def _loaded(self, blocks: Sequence[int]) -> int:
        """The state that is stored in these blocks; a wrong one if they differ."""
        states = {value ^ place for place, block in enumerate(blocks) for value in self._kv[block]}
        return states.pop() if len(states) == 1 else WRONG_STATE


def _parts(blocks: np.ndarray, part: SnapshotPart) -> list[list[int]]:
    """The blocks of each snapshot."""
    return blocks.reshape(-1, part.num_blocks).tolist()
