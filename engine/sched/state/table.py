"""The moving numbers of every unfinished request, in columns. Nothing is stored twice."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int32]
ONE: Counts = np.array(1, dtype=np.int32)  # numpy adds it twice as fast as a Python int

WATCHED = 1  # some resource wants to be asked in each step
SERIAL = 2  # while a token is being computed, no step computes the next one


class TableColumn:
    """One buffer with two faces: ``at`` for scalars, ``all`` for vectors.

    An ``array.array`` reads a scalar in 40 ns, a numpy array in 160.
    """

    __slots__ = ("all", "at")

    code = "i"  # 32 bits

    def __init__(self, length: int) -> None:
        self._attach(array(self.code, [0]) * length)

    def grow(self) -> None:
        """Twice as long, old values kept."""
        self._attach(self.at + array(self.code, [0]) * len(self.at))

    def _attach(self, buffer: array[int]) -> None:
        self.at = buffer
        self.all: Counts = np.frombuffer(buffer, dtype=self.code)


class StepColumn(TableColumn):
    """Numbers of steps: 32 bits are used up within weeks."""

    __slots__ = ()

    code = "q"  # 64 bits


class Table:
    """Rows of unfinished requests. A row is given back when its last step in flight has retired.

    Counts are in tokens. ``num_tokens`` are known (prompt and settled outputs), ``num_pending``
    sampled in steps in flight, ``num_computed`` have their KV written or being written.
    ``limit`` is the length at which the request ends. A row's generation never goes back, so a
    result can tell whether it still belongs to the row's request.
    """

    def __init__(self, num_rows: int = 64) -> None:
        self.num_prompt = TableColumn(num_rows)
        self.num_tokens = TableColumn(num_rows)
        self.num_computed = TableColumn(num_rows)
        self.num_pending = TableColumn(num_rows)
        self.limit = TableColumn(num_rows)
        self.generation = TableColumn(num_rows)
        self.slot = TableColumn(num_rows)
        self.in_flight = TableColumn(num_rows)  # steps launched and not settled that hold the row
        self.client = TableColumn(num_rows)
        self.alive = TableColumn(num_rows)  # 1 from add to finish
        self.told = TableColumn(num_rows)  # 0 from a seat to the first output from there
        self.flags = TableColumn(num_rows)  # what resources want: WATCHED, SERIAL
        self.plain = StepColumn(num_rows)  # the last step in which the row was marked as plain
        self.considered = StepColumn(num_rows)  # the last step in which the request was offered
        self.stop_id = TableColumn(
            num_rows
        )  # the only token that ends the request; -1 none, -2 several
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        return len(self.alive.at)

    def take(self) -> int:
        """A free row, its counts zero and its generation new."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        for column in (self.num_tokens, self.num_computed, self.num_pending, self.in_flight):
            column.at[row] = 0
        self.generation.at[row] += 1
        self.slot.at[row] = self.considered.at[row] = -1
        self.alive.at[row] = 1
        return row

    def give_back(self, row: int) -> None:
        """Free a row to which nothing refers any more."""
        self.alive.at[row] = 0
        self._free.append(row)

    def _grow(self) -> None:
        num_rows = self.num_rows
        for value in vars(self).values():
            if isinstance(value, TableColumn):
                value.grow()
        self._free.extend(range(2 * num_rows - 1, num_rows - 1, -1))
