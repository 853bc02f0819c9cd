"""Outputs that have come from a core and that nobody has read, less those of aborted requests.

    of a request      abort sent            answered
    rows that came    ──── dropped ──────────────│──── those of the next request with its id ──>

Before the answer they are the aborted request's, whenever they came; behind it they cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.messages.columns import without_ids
from engine.messages.outputs import CoreOutputs, Finished


class Unread:
    """Batches in the order in which they came."""

    def __init__(self) -> None:
        self._batches: list[CoreOutputs] = []
        self._ends: dict[str, Finished] = {}  # in them, or dropped from those that were taken
        self._aborting: dict[str, int] = {}  # request -> number of its last abort, not answered yet
        self._wanted_from: dict[str, int] = {}  # aborted request -> place of the first good batch

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: CoreOutputs) -> None:
        self._batches.append(batch)
        for end in batch.finished:
            self._ends[batch.request_ids[end.index]] = end

    def abort(self, number: int, request_ids: Sequence[str]) -> None:
        """What has come of these, and what comes before the answer, is for nobody."""
        self._aborting.update(dict.fromkeys(request_ids, number))

    def aborted(self, number: int, request_ids: Sequence[str]) -> dict[str, Finished]:
        """The answer has come. Returns the ends that are dropped: the core had no more to abort."""
        ends: dict[str, Finished] = {}
        for request_id in request_ids:
            if request_id in self._ends:
                ends[request_id] = self._ends.pop(request_id)
            if self._aborting.get(request_id) == number:  # else another abort is on its way
                del self._aborting[request_id]
                self._wanted_from[request_id] = len(self._batches)
        return ends

    def take(self) -> list[CoreOutputs]:
        """What there is to read."""
        batches, self._batches = self._batches, []
        if self._aborting or self._wanted_from:
            batches = list(self._wanted(batches))
        self._wanted_from.clear()
        self._ends = {name: end for name, end in self._ends.items() if name in self._aborting}
        return batches

    def _wanted(self, batches: Sequence[CoreOutputs]) -> Iterator[CoreOutputs]:
        """The batches less what is for nobody."""
        for place, batch in enumerate(batches):
            dropped = [
                name
                for name in batch.request_ids
                if name in self._aborting or place < self._wanted_from.get(name, 0)
            ]
            left = without_ids(batch, dropped) if dropped else batch
            if left.request_ids or left.stats is not None:
                yield left
