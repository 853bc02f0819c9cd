"""Sends the plans of successive steps, in which a column that is the last step's is not sent again.

The scheduler passes the same array on while the same requests run, and the worker recognises by it
that a step repeats the last one. Both hold on the other side, too.
"""

from __future__ import annotations

import msgspec

from engine.errors import WireError
from engine.ipc.plans import decode, encode
from engine.messages.step import EMPTY, StepPlan

COLUMNS = (
    "rows", "slots", "generations", "starts", "counts", "samples", "block_slots", "block_indices",
    "block_ids",
)  # fmt: skip
NUM_BYTES = 2  # of the set of columns that are not sent


class PlanWriter:
    """Encodes plans, in the order of their steps."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def encode(self, plan: StepPlan) -> bytes:
        """Encode the next plan. Raises ``TypeError`` as ``engine.ipc.plans.encode``."""
        last, self._last, kept, found = self._last, plan, 0, plan
        if last is not None:
            same = [name for name in COLUMNS if getattr(plan, name) is getattr(last, name)]
            kept = sum(1 << COLUMNS.index(name) for name in same)
            found = msgspec.structs.replace(plan, **dict.fromkeys(same, EMPTY))
            if "rows" in same:
                found.rows = EMPTY_ROWS
        return kept.to_bytes(NUM_BYTES, "little") + encode(found)


EMPTY_ROWS = EMPTY.astype("intp")


class PlanReader:
    """Decodes what a ``PlanWriter`` has encoded, in the same order."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def decode(self, data: bytes) -> StepPlan:
        """Decode the next plan. Raises ``WireError``."""
        kept, plan = int.from_bytes(data[:NUM_BYTES], "little"), decode(data[NUM_BYTES:], StepPlan)
        if kept and self._last is None:
            raise WireError("the first plan leaves columns out")
        for index, name in enumerate(COLUMNS):
            if kept >> index & 1:
                setattr(plan, name, getattr(self._last, name))
        self._last = plan
        return plan
