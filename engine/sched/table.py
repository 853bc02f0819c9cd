"""Table: the moving numbers of every unfinished request, a row each, in columns."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.messages.requests import AddRequest

WATCHED = 1  # some resource is called for the row in each step
SERIAL = 2  # while a token is being computed, no step computes the next one

Counts = NDArray[np.int32]
Array = NDArray[Any]


FEW = 8  # rows up to which a loop is quicker than vectors
ONE: Counts = np.array(1, dtype=np.int32)  # numpy adds it twice as fast as a Python int


class Column:
    """One buffer with two faces: ``at`` for scalars, ``all`` for vectors.

    An ``array.array`` reads a scalar in 40 ns, a numpy array in 160.
    """

    __slots__ = ("all", "at")

    code: str
    at: array[Any]
    all: NDArray[Any]

    def __init__(self, length: int) -> None:
        self._attach(array(self.code, [0]) * length)

    def grow(self) -> None:
        """Twice as long, old values kept."""
        self._attach(self.at + array(self.code, [0]) * len(self.at))

    def _attach(self, buffer: array[Any]) -> None:
        self.at = buffer
        self.all = np.frombuffer(buffer, dtype=self.code)


class TableColumn(Column):
    """Numbers of 32 bits."""

    __slots__ = ()

    code = "i"
    at: array[int]
    all: Counts


class LongColumn(Column):
    """Numbers of 64 bits, as those of steps: 32 bits are used up within weeks."""

    __slots__ = ()

    code = "q"
    at: array[int]
    all: NDArray[np.int64]


class FloatColumn(Column):
    """Seconds, and numbers of policies."""

    __slots__ = ("default",)

    code = "d"
    at: array[float]
    all: NDArray[np.float64]

    def __init__(self, length: int, default: float = 0.0) -> None:
        self.default = default  # of a row nobody wrote to
        self._attach(array(self.code, [default]) * length)


class Users:
    """Small numbers for the users who have requests, so that vectors can compare them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._counts: list[int] = []  # of their requests
        self._free: list[int] = []

    def __len__(self) -> int:
        """Numbers are below this."""
        return len(self._names)

    def enter(self, name: str) -> int:
        """One more request of this user: the user's number."""
        number = self._numbers.get(name)
        if number is None:
            if not self._free:
                self._free.append(len(self._names))
                self._names.append("")
                self._counts.append(0)
            number = self._numbers[name] = self._free.pop()
            self._names[number] = name
        self._counts[number] += 1
        return number

    def leave(self, number: int) -> None:
        """One less. The number of a user without requests is free."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._numbers[self._names[number]]
            self._free.append(number)


class Facts:
    """What only policies read of the rows of a table, and its stamps.

    ``ranks`` has a column for each place of ranks that were given in arrays: see ``Request.rank``.
    ``own`` are numbers that the policy keeps, by name.
    """

    def __init__(self, num_rows: int) -> None:
        self.arrival = LongColumn(num_rows)
        self.arrival_time = FloatColumn(num_rows)
        self.priority = LongColumn(num_rows)
        self.deadline = FloatColumn(num_rows)  # inf: none
        self.tbt = FloatColumn(num_rows)  # inf: none
        self.first_token = FloatColumn(num_rows)  # when it was settled; NaN before
        self.last_token = FloatColumn(num_rows)
        self.num_preempted = TableColumn(num_rows)
        self.is_waiting = TableColumn(num_rows)
        self.user = TableColumn(num_rows)  # the place of its name in ``users``
        self.users = Users()
        self.ranks: list[LongColumn | FloatColumn] = []
        self.own: dict[str, FloatColumn] = {}

    def enter(self, row: int, arrival: int, add: AddRequest) -> None:
        """A request takes this row."""
        self.arrival.at[row] = arrival
        self.arrival_time.at[row] = add.arrival_time
        self.priority.at[row] = add.priority
        self.deadline.at[row] = inf if add.deadline is None else add.deadline
        self.tbt.at[row] = inf if add.tbt is None else add.tbt
        self.first_token.at[row] = self.last_token.at[row] = nan
        self.num_preempted.at[row] = 0
        self.is_waiting.at[row] = 1
        self.user.at[row] = self.users.enter(add.user)
        for own in self.own.values():
            own.at[row] = own.default

    def leave(self, row: int) -> None:
        """The row is given back."""
        if (user := self.user.at[row]) >= 0:
            self.users.leave(user)
            self.user.at[row] = -1

    def stamp(self, rows: NDArray[np.intp], started: list[int], now: float) -> None:
        """These rows have new tokens; those at the places ``started`` have their first from this
        seat."""
        self.last_token.all[rows] = now
        if started:
            first, begun = self.first_token.all, rows[started]
            first[begun[np.isnan(first[begun])]] = now

    def stamp_one(self, row: int, now: float) -> None:
        """``stamp`` for one row that has new tokens."""
        self.last_token.at[row] = now
        if isnan(self.first_token.at[row]):
            self.first_token.at[row] = now

    def own_column(self, name: str, default: float) -> FloatColumn:
        """The policy's column of this name, made when it is first read."""
        if name not in self.own:
            self.own[name] = FloatColumn(len(self.arrival.at), default)
        return self.own[name]

    def set_ranks(self, rows: NDArray[np.intp], columns: Sequence[Array]) -> None:
        """Ranks of the requests in these rows: a column for each place, of int64 or float64."""
        if not self.ranks:
            self.ranks = [LongColumn(len(self.arrival.at)) for _ in columns]
        for place, column in enumerate(columns):
            if column.dtype.kind == "f" and isinstance(self.ranks[place], LongColumn):
                whole, self.ranks[place] = self.ranks[place], FloatColumn(len(self.arrival.at))
                self.ranks[place].all[:] = whole.all
            self.ranks[place].all[rows] = column

    def grow(self) -> None:
        """Twice as many rows."""
        for value in (*vars(self).values(), *self.ranks, *self.own.values()):
            if isinstance(value, Column):
                value.grow()


class Table:
    """Rows of unfinished requests. A row is given back when its last step in flight has retired.

    Counts are in tokens. ``num_tokens`` are known (prompt and settled outputs), ``num_pending``
    sampled in steps in flight, ``num_computed`` have their KV written or being written.
    ``limit`` is the length at which the request ends. A row's generation never goes back, so a
    result shows whether it still belongs to the row's request.

    Only methods of this class write ``num_tokens``, ``num_pending``, ``num_computed`` and
    ``in_flight``:

        advance   tokens are granted       computed + n, pending + 1 if the step samples
        launch    the step is planned      in flight + 1
        land      its result is there      in flight - 1
        append    the result has tokens    known + n, pending - 1
        take_back, start_from, restart     fewer or other tokens are computed than was counted
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
        self.has_output = TableColumn(num_rows)  # 0 from a seat to the first output from there
        self.flags = TableColumn(num_rows)  # what resources want: WATCHED, SERIAL
        self.plain = LongColumn(num_rows)  # the last step in which the row was marked as plain
        self.considered = LongColumn(num_rows)  # the last step in which the request was offered
        self.stop_id = TableColumn(num_rows)  # the token that ends the request; -1 none, -2 several
        self.facts = Facts(num_rows)
        self.bind()
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        return len(self.alive.at)

    def take(self, num_prompt: int) -> int:
        """A free row for a request of this many tokens, its other counts zero and its generation
        new."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        for column in (self.num_computed, self.num_pending, self.in_flight):
            column.at[row] = 0
        self.num_tokens.at[row] = self.num_prompt.at[row] = num_prompt
        self.generation.at[row] += 1
        self.slot.at[row] = self.considered.at[row] = self.facts.user.at[row] = -1
        self.alive.at[row] = 1
        return row

    def give_back(self, row: int) -> None:
        """Free a row to which nothing refers any more."""
        self.alive.at[row] = 0
        self.facts.leave(row)
        self._free.append(row)

    def advance(self, rows: NDArray[np.intp], num_steps: int = 1) -> Counts:
        """A step computes the next token of each row and samples the one after it; or ``num_steps``
        such steps do. Returns how many tokens of each are computed then."""
        more = ONE if num_steps == 1 else np.int32(num_steps)
        self.num_computed.all[rows] = computed = self.num_computed.all[rows] + more
        self.num_pending.all[rows] += more
        return computed

    def bind(self) -> None:
        """Make ``advance_plain`` for the columns as they are now: ``advance`` of a single row up to
        this many tokens, one more than are computed. A closure is twice as fast as a method."""
        computed, pending = self.num_computed.at, self.num_pending.at

        def advance(row: int, upto: int) -> None:
            computed[row] = upto
            pending[row] += 1

        self.advance_plain: Callable[[int, int], None] = advance

    def advance_one(self, row: int, num_tokens: int) -> bool:
        """A step computes this many tokens of one row. Does it sample the token after them, because
        no further one is known or being sampled?"""
        self.num_computed.at[row] = upto = self.num_computed.at[row] + num_tokens
        samples = upto >= self.num_tokens.at[row] + self.num_pending.at[row]
        if samples:
            self.num_pending.at[row] += 1
        return samples

    def append(
        self,
        rows: NDArray[np.intp],
        sequences: Sequence[array[int]],
        tokens: Iterable[Any],
        num_steps: int = 1,
    ) -> Counts:
        """A step has sampled a token of each row. Returns how many tokens of each are known now.

        ``sequences``: the known tokens of each. ``tokens``: a token for each; or, of ``num_steps``
        such steps, an array of them.
        """
        put: Callable[..., None] = array.append if num_steps == 1 else array.extend
        more = ONE if num_steps == 1 else np.int32(num_steps)
        deque(map(put, sequences, tokens), maxlen=0)
        self.num_tokens.all[rows] = known = self.num_tokens.all[rows] + more
        self.num_pending.all[rows] -= more
        return known

    def append_one(self, row: int, sequence: array[int], tokens: list[int]) -> int:
        """A step has sampled these tokens of one row: several, if drafts were right. Returns how
        many tokens are known now."""
        sequence.extend(tokens)
        self.num_tokens.at[row] = known = self.num_tokens.at[row] + len(tokens)
        self.num_pending.at[row] -= 1
        return known

    def launch(self, rows: NDArray[np.intp]) -> None:
        """A step with these rows is in flight."""
        if len(rows) > FEW:
            self.in_flight.all[rows] += ONE
        else:
            for row in rows.tolist():
                self.in_flight.at[row] += 1

    def land(self, rows: NDArray[np.intp]) -> None:
        """The oldest step in flight with these rows has a result, whatever that is."""
        if len(rows) > FEW:
            self.in_flight.all[rows] -= ONE
        else:
            for row in rows.tolist():
                self.in_flight.at[row] -= 1

    def take_back(self, rows: NDArray[np.intp], num_tokens: Counts) -> None:
        """The last tokens computed, this many of each row, were rejected drafts."""
        self.num_computed.all[rows] -= num_tokens

    def start_from(self, row: int, num_computed: int) -> None:
        """The KV of this many tokens is there; the row computes those after them."""
        self.num_computed.at[row] = num_computed

    def restart(self, row: int) -> None:
        """Nothing is computed, and results of steps in flight are no longer the row's."""
        self.generation.at[row] += 1
        self.num_computed.at[row] = self.num_pending.at[row] = 0

    def _grow(self) -> None:
        num_rows = self.num_rows
        for value in vars(self).values():
            if isinstance(value, Column):
                value.grow()
        self.facts.grow()
        self.bind()
        self._free.extend(range(2 * num_rows - 1, num_rows - 1, -1))
