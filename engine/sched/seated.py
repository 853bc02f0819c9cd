"""The rows of running requests, as columns that last as long as nobody comes or goes."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from engine.sched.table import Table

Rows = NDArray[np.intp]  # numpy indexes with intp five times faster than with int32
NO_ROWS: Rows = np.empty(0, dtype=np.intp)


class SeatedColumns:
    """Rows in ascending order, and what does not change while the same requests run."""

    def __init__(self, rows: Rows, table: Table) -> None:
        self.rows = rows
        self.slots = table.slot.all[rows]
        self.generations = table.generation.all[rows]
        self.limits = table.limit.all[rows]


class Seated:
    """Who runs, by row. ``list`` is ascending and only to be read.

    ``version`` is raised whenever a request comes or goes. A plan that has a row for each of them
    is noted with it, so that its result can tell whether they are still the same.
    """

    def __init__(self, table: Table) -> None:
        self.list: list[int] = []
        self.version = 0
        self._table = table
        self._columns: SeatedColumns | None = None
        self._whole: dict[int, int] = {}  # steps in flight that have all rows -> version then

    def add(self, row: int) -> None:
        insort(self.list, row)
        self._change()

    def remove(self, row: int) -> None:
        del self.list[bisect_left(self.list, row)]
        self._change()

    @property
    def columns(self) -> SeatedColumns:
        """The same object until the next request comes or goes."""
        if self._columns is None:
            self._columns = SeatedColumns(np.array(self.list, dtype=np.intp), self._table)
        return self._columns

    def sorted(self, rows: list[int]) -> Rows:
        """Some of the rows in ascending order."""
        if len(rows) == len(self.list):
            return self.columns.rows
        return np.array(sorted(rows), dtype=np.intp)

    def note_whole(self, step: int) -> None:
        """The plan of this step has ``columns.rows``; its result will come."""
        self._whole[step] = self.version

    def take_whole(self, step: int) -> bool:
        """Has the plan of this step a row for each that runs now, as it was planned? Asked once."""
        return self._whole.pop(step, -1) == self.version

    def _change(self) -> None:
        self.version += 1
        self._columns = None
