"""Penalties, for requests that ask for some; output tokens are counted on the device."""

from __future__ import annotations

import numpy as np
import torch

from engine.messages.step import Column, NewSeq
from engine.sample.edits import Upload
from engine.sample.spec import SamplingSpec
from kernels import slots as on_slots
from kernels.slots import Rows

FIRST_SEATS = 8


class PenaltyTables:
    """One seat per such request: counts over the whole vocabulary are too large for every slot."""

    def __init__(self, upload: Upload, vocab_size: int, first_seats: int = FIRST_SEATS) -> None:
        self._upload = upload
        self._vocab_size = vocab_size
        self._first_seats = first_seats
        self._state = on_slots.new_penalties(0, vocab_size, upload(np.empty(0)).device)
        self._seat_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []

    def has(self, slot: int) -> bool:
        return slot in self._seat_of

    def add(self, seq: NewSeq, spec: SamplingSpec) -> None:
        """Count the tokens that a request starts with, if it asks for penalties."""
        if spec.penalties is None:
            return
        if not self._free:
            self._grow()
        seat = self._seat_of[seq.slot] = self._free.pop()
        for column, value in zip(self._state[2:], spec.penalties, strict=True):
            column[seat].fill_(value)
        tokens = self._upload(np.array(seq.token_ids, dtype=np.int32))
        on_slots.seat(self._state, seat, tokens, seq.num_prompt)

    def remove(self, slot: int) -> None:
        if slot in self._seat_of:
            self._free.append(self._seat_of.pop(slot))

    def seats(self, slots: Column) -> torch.Tensor | None:
        """The seat of each row [R] int32, -1 for none; ``None`` if no row has one."""
        if self._seat_of.keys().isdisjoint(slots.tolist()):
            return None
        seats = [self._seat_of.get(slot, -1) for slot in slots.tolist()]
        return self._upload(np.array(seats, dtype=np.int32))

    def apply(self, rows: Rows, seats: torch.Tensor, drafts: torch.Tensor | None) -> None:
        """Lower the logits of tokens seen before, in place.

        drafts: [R, K] int32, those that come before each row; -1: none.
        """
        on_slots.penalise_rows(rows.logits, self._state, seats, drafts)

    def count(self, seats: torch.Tensor, drawn: torch.Tensor) -> None:
        """Count the drawn tokens [R] that stand; negative: rejected or none."""
        tokens = drawn.clamp(min=0)[:, None]
        on_slots.count_tokens(self._state, seats, tokens, (drawn >= 0).int())

    def _grow(self) -> None:
        old = self._state
        num_seats = max(self._first_seats, 2 * len(old.counts))
        self._state = on_slots.new_penalties(num_seats, self._vocab_size, old.counts.device)
        for column, values in zip(self._state, old, strict=True):
            column[: len(values)] = values
        self._free += range(len(old.counts), num_seats)
