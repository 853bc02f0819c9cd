"""Sends the plans of successive steps, in which a column that is the last step's is not sent again.

The scheduler passes the same array on while the same requests run, and the worker recognises by it
that a step repeats the last one. Both hold on the other side, too. A plan that has columns only is
sent in a short form, as most are:

    a word, bit i set: column i is the last step's; ``SHORT``; step; number of tokens
    of each other column the number of entries, then its bytes, in order of ``COLUMNS``
"""

from __future__ import annotations

import struct
import sys

import msgspec
import numpy as np

from engine.errors import WireError
from engine.ipc.plans import decode, encode
from engine.messages.step import EMPTY, StepPlan

COLUMNS = (
    "rows", "slots", "generations", "starts", "counts", "samples", "block_slots", "block_indices",
    "block_ids",
)  # fmt: skip
ROWS = np.dtype(np.intp)
ENTRIES = np.dtype(np.int32)
EMPTY_ROWS = np.empty(0, ROWS)
WHOLE, SHORT = 0, 1
_WORDS = struct.Struct("<HH")
_HEADER = struct.Struct("<HHqq")
_LENGTH = struct.Struct("<I")

assert sys.byteorder == "little", "columns are sent as they are in memory"


class PlanWriter:
    """Encodes plans, in the order of their steps."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def encode(self, plan: StepPlan) -> bytes:
        """Encode the next plan. Raises ``TypeError`` as ``engine.ipc.plans.encode``."""
        last, self._last = self._last, plan
        kept, bit, sent = 0, 1, []
        for name in COLUMNS:
            column = getattr(plan, name)
            if last is not None and column is getattr(last, name):
                kept |= bit
            else:
                sent.append(column)
            bit <<= 1
        if plan.new or plan.freed_slots or plan.parts or plan.proposals is not None:
            return self._whole(plan, kept)
        parts = [_HEADER.pack(kept, SHORT, plan.step, plan.num_tokens)]
        for column in sent:
            parts += _LENGTH.pack(len(column)), column.tobytes()
        return b"".join(parts)

    def _whole(self, plan: StepPlan, kept: int) -> bytes:
        empty = {name: EMPTY for index, name in enumerate(COLUMNS) if kept >> index & 1}
        found = msgspec.structs.replace(plan, **empty)
        if "rows" in empty:
            found.rows = EMPTY_ROWS
        return _WORDS.pack(kept, WHOLE) + encode(found)


class PlanReader:
    """Decodes what a ``PlanWriter`` has encoded, in the same order."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def decode(self, data: bytes) -> StepPlan:
        """Decode the next plan. Raises ``WireError``."""
        kept, form = _WORDS.unpack_from(data)
        if kept and self._last is None:
            raise WireError("the first plan leaves columns out")
        if form == SHORT:
            plan = self._short(data)
        else:
            plan = decode(data[_WORDS.size :], StepPlan)
            for index, name in enumerate(COLUMNS):
                if kept >> index & 1:
                    setattr(plan, name, getattr(self._last, name))
        self._last = plan
        return plan

    def _short(self, data: bytes) -> StepPlan:
        kept, _, step, num_tokens = _HEADER.unpack_from(data)
        place, columns = _HEADER.size, []
        for name in COLUMNS:
            if kept & 1:
                columns.append(getattr(self._last, name))
            else:
                dtype = ENTRIES if columns else ROWS
                (num,) = _LENGTH.unpack_from(data, place)
                place += _LENGTH.size
                columns.append(np.frombuffer(data, dtype, num, place).copy())
                place += num * dtype.itemsize
            kept >>= 1
        rows, slots, generations, starts, counts, samples, *blocks = columns
        block_slots, block_indices, block_ids = blocks
        return StepPlan(
            step,
            rows,
            slots,
            generations,
            starts,
            counts,
            samples,
            new=[],
            block_slots=block_slots,
            block_indices=block_indices,
            block_ids=block_ids,
            freed_slots=[],
            num_tokens=num_tokens,
        )
