"""Penalties of the requests that ask for some: what was said is counted on the device."""

from __future__ import annotations

import numpy as np
import torch

from engine.messages.step import Column, NewSeq
from engine.worker.cuda.platform import Platform
from kernels import slots as on_slots
from kernels.slots import Rows

FIRST_SEATS = 8
NOTHING = (1.0, 0.0, 0.0)


class PenaltyTables:
    """A seat for each such request: counts of the whole vocabulary are too large for every slot."""

    def __init__(self, platform: Platform, vocab_size: int) -> None:
        self._platform = platform
        self._vocab_size = vocab_size
        self._state = on_slots.new_penalties(0, vocab_size, platform.device)
        self._seat_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []

    def has(self, slot: int) -> bool:
        return slot in self._seat_of

    def add(self, seq: NewSeq) -> None:
        """Count what a request comes with, if it asks for penalties."""
        params = seq.params
        asked = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if asked == NOTHING:
            return
        if not self._free:
            self._grow()
        seat = self._seat_of[seq.slot] = self._free.pop()
        for column, value in zip(self._state[2:], asked, strict=True):
            column[seat].fill_(value)
        tokens = self._platform.upload(np.array(seq.token_ids, dtype=np.int32))
        on_slots.seat(self._state, seat, tokens, seq.num_prompt)

    def remove(self, slot: int) -> None:
        if slot in self._seat_of:
            self._free.append(self._seat_of.pop(slot))

    def seats(self, slots: Column) -> torch.Tensor | None:
        """The seat of each row [R] int32, -1 for none; ``None`` if no row has one."""
        if not self._seat_of:
            return None
        seats = [self._seat_of.get(slot, -1) for slot in slots.tolist()]
        return self._platform.upload(np.array(seats, dtype=np.int32))

    def apply(self, rows: Rows, seats: torch.Tensor) -> None:
        """Lower the logits of tokens seen before, in place."""
        on_slots.penalise_rows(rows.logits, self._state, seats)

    def count(self, seats: torch.Tensor, chosen: torch.Tensor) -> None:
        """Count what was chosen [R] for the rows, -1 where nothing was."""
        tokens = chosen.clamp(min=0)[:, None]
        on_slots.count_tokens(self._state, seats, tokens, (chosen >= 0).int())

    def _grow(self) -> None:
        old = self._state
        num_seats = max(FIRST_SEATS, 2 * len(old.counts))
        self._state = on_slots.new_penalties(num_seats, self._vocab_size, self._platform.device)
        for column, values in zip(self._state, old, strict=True):
            column[: len(values)] = values
        self._free += range(len(old.counts), num_seats)
