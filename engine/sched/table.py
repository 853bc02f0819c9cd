"""Table: the changing numbers of all unfinished requests, one row each, stored in columns."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.messages.requests import AddRequest

WATCHED = 1  # the hooks of a resource are called for the row in each step
SERIAL = 2  # at most one step in flight contains the row

Counts = NDArray[np.int32]
Array = NDArray[Any]


FEW = 8  # up to this many rows a loop is faster than numpy
ONE: Counts = np.array(1, dtype=np.int32)  # numpy adds this twice as fast as a Python int


class Column:
    """A buffer with two views: ``at``, which is fast for single values, and ``all``, a numpy
    array."""

    __slots__ = ("all", "at")

    code: str
    at: array[Any]
    all: NDArray[Any]

    def __init__(self, length: int) -> None:
        self._attach(array(self.code, [0]) * length)

    def grow(self) -> None:
        """Double the length; old values are kept."""
        self._attach(self.at + array(self.code, [0]) * len(self.at))

    def _attach(self, buffer: array[Any]) -> None:
        self.at = buffer
        self.all = np.frombuffer(buffer, dtype=self.code)


class TableColumn(Column):
    """A column of 32-bit integers."""

    __slots__ = ()

    code = "i"
    at: array[int]
    all: Counts


class LongColumn(Column):
    """A column of 64-bit integers, e.g. step numbers, which exceed 32 bits within weeks."""

    __slots__ = ()

    code = "q"
    at: array[int]
    all: NDArray[np.int64]


class FloatColumn(Column):
    """A column of float64: seconds, and numbers that policies store."""

    __slots__ = ("default",)

    code = "d"
    at: array[float]
    all: NDArray[np.float64]

    def __init__(self, length: int, default: float = 0.0) -> None:
        self.default = default  # value of rows that have not been written
        self._attach(array(self.code, [default]) * length)


class Names:
    """Maps names that requests have, of users or of adapters, to small integers, for arrays."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._counts: list[int] = []  # requests per name
        self._free: list[int] = []

    def __len__(self) -> int:
        """The length that an array indexed by these numbers must have."""
        return len(self._names)

    def __getitem__(self, number: int) -> str:
        """The name with this number."""
        return self._names[number]

    def enter(self, name: str) -> int:
        """Count one more request with this name; returns the name's number."""
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
        """Count one request less. The number of a name without requests is reused."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._numbers[self._names[number]]
            self._free.append(number)


class Facts:
    """Columns of the request table that only policies read, and times of output tokens.

    ``ranks[k]``: element k of each request's rank, if the policy returns ranks as arrays. ``own``:
    the columns that the policy has defined, by name (``view.own``).
    """

    def __init__(self, num_rows: int) -> None:
        self.arrival = LongColumn(num_rows)
        self.arrival_time = FloatColumn(num_rows)
        self.priority = LongColumn(num_rows)
        self.deadline = FloatColumn(num_rows)  # seconds; inf for none
        self.tbt = FloatColumn(num_rows)  # seconds; inf for none
        self.first_token = FloatColumn(num_rows)  # when its step was settled; NaN before
        self.last_token = FloatColumn(num_rows)
        self.num_preempted = TableColumn(num_rows)
        self.is_waiting = TableColumn(num_rows)
        self.user = TableColumn(num_rows)  # number of the user in ``users``
        self.users = Names()
        self.adapter = TableColumn(num_rows)  # number of the adapter in ``adapters``; -1 for none
        self.adapters = Names()
        self.ranks: list[LongColumn | FloatColumn] = []
        self.own: dict[str, FloatColumn] = {}

    def enter(self, row: int, arrival: int, add: AddRequest) -> None:
        """Set the columns for a new request in this row."""
        self.arrival.at[row] = arrival
        self.arrival_time.at[row] = add.arrival_time
        self.priority.at[row] = add.priority
        self.deadline.at[row] = inf if add.deadline is None else add.deadline
        self.tbt.at[row] = inf if add.tbt is None else add.tbt
        self.first_token.at[row] = self.last_token.at[row] = nan
        self.num_preempted.at[row] = 0
        self.is_waiting.at[row] = 1
        self.user.at[row] = self.users.enter(add.user)
        self.set_adapter(row, add.adapter)
        for own in self.own.values():
            own.at[row] = own.default

    def leave(self, row: int) -> None:
        """Remove an ended request's row from the counts of its user and its adapter."""
        if (user := self.user.at[row]) >= 0:
            self.users.leave(user)
            self.user.at[row] = -1
            self.set_adapter(row, None)

    def set_adapter(self, row: int, name: str | None) -> None:
        """Set the adapter of the request in this row; ``None``: it uses none."""
        if (number := self.adapter.at[row]) >= 0:
            self.adapters.leave(number)
        self.adapter.at[row] = -1 if name is None else self.adapters.enter(name)

    def stamp(self, rows: NDArray[np.intp], started: list[int], now: float) -> None:
        """Set the times of the last token, to ``now``, and of the first. ``started``: indices in
        ``rows`` of requests that may have got their first token."""
        self.last_token.all[rows] = now
        if started:
            first, begun = self.first_token.all, rows[started]
            first[begun[np.isnan(first[begun])]] = now

    def stamp_one(self, row: int, now: float) -> None:
        """Set the times of a request's last token and, if it is not set, of its first."""
        self.last_token.at[row] = now
        if isnan(self.first_token.at[row]):
            self.first_token.at[row] = now

    def own_column(self, name: str, default: float) -> FloatColumn:
        """The policy's column of this name, created at its first use."""
        if name not in self.own:
            self.own[name] = FloatColumn(len(self.arrival.at), default)
        return self.own[name]

    def set_ranks(self, rows: NDArray[np.intp], columns: Sequence[Array]) -> None:
        """Set the ranks of requests. ``columns[k]``: element k of each rank, int64 or float64."""
        if not self.ranks:
            self.ranks = [LongColumn(len(self.arrival.at)) for _ in columns]
        for place, column in enumerate(columns):
            if column.dtype.kind == "f" and isinstance(self.ranks[place], LongColumn):
                whole, self.ranks[place] = self.ranks[place], FloatColumn(len(self.arrival.at))
                self.ranks[place].all[:] = whole.all
            self.ranks[place].all[rows] = column

    def grow(self) -> None:
        """Double the number of rows."""
        for value in (*vars(self).values(), *self.ranks, *self.own.values()):
            if isinstance(value, Column):
                value.grow()


class Table:
    """One row for each unfinished request. A row is freed when its request has ended and no step in
    flight contains it.

    Counts are in tokens. ``num_tokens``: prompt, and output that has arrived. ``num_pending``: to
    be sampled by steps in flight. ``num_computed``: KV computed, or being computed by steps in
    flight. ``limit``: length at which the request ends. ``generation``: increases whenever the row
    gets a new request or restarts, so that outdated results can be recognized.

    Only methods of this class write ``num_tokens``, ``num_pending``, ``num_computed`` and
    ``in_flight``:

        advance   tokens are granted            computed + n, pending + 1 if the step samples
        launch    the step is planned           in flight + 1
        land      the step's result arrives     in flight - 1
        append    the result has tokens         tokens + n, pending - 1
        take_back, start_from, restart          correct ``num_computed``
    """

    def __init__(self, num_rows: int = 64) -> None:
        self.num_prompt = TableColumn(num_rows)
        self.num_tokens = TableColumn(num_rows)
        self.num_computed = TableColumn(num_rows)
        self.num_pending = TableColumn(num_rows)
        self.limit = TableColumn(num_rows)
        self.generation = TableColumn(num_rows)
        self.slot = TableColumn(num_rows)
        self.in_flight = TableColumn(num_rows)  # number of steps in flight that contain the row
        self.client = TableColumn(num_rows)
        self.alive = TableColumn(num_rows)  # 1 while the request is unfinished
        self.has_output = TableColumn(num_rows)  # 1 after the first output since it got its seat
        self.flags = TableColumn(num_rows)  # WATCHED and SERIAL, as resources require
        self.plain = LongColumn(num_rows)  # last step in which the row was a plain decode
        self.considered = LongColumn(num_rows)  # last step in which tokens were offered
        self.stop_id = TableColumn(num_rows)  # token that ends the request; -1 none, -2 several
        self.facts = Facts(num_rows)
        self.bind()
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        return len(self.alive.at)

    def take(self, num_prompt: int) -> int:
        """Allocate a row for a request with ``num_prompt`` prompt tokens and initialise it."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        for column in (self.num_computed, self.num_pending, self.in_flight):
            column.at[row] = 0
        self.num_tokens.at[row] = self.num_prompt.at[row] = num_prompt
        self.generation.at[row] += 1
        self.slot.at[row] = self.considered.at[row] = -1
        self.facts.user.at[row] = self.facts.adapter.at[row] = -1
        self.alive.at[row] = 1
        return row

    def give_back(self, row: int) -> None:
        """Free the row of an ended request that no step in flight contains any more."""
        self.alive.at[row] = 0
        self.facts.leave(row)
        self._free.append(row)

    def advance(self, rows: NDArray[np.intp], num_steps: int = 1) -> Counts:
        """Count that a step computes one token of each row and samples the next one; with
        ``num_steps``, as many steps. Returns the new ``num_computed`` of the rows."""
        more = ONE if num_steps == 1 else np.int32(num_steps)
        self.num_computed.all[rows] = computed = self.num_computed.all[rows] + more
        self.num_pending.all[rows] += more
        return computed

    def bind(self) -> None:
        """Define ``advance_plain(row, upto)``: a fast ``advance`` for one row, which sets its
        number of computed tokens to ``upto``. Must be called again when the columns have grown."""
        computed, pending = self.num_computed.at, self.num_pending.at

        def advance(row: int, upto: int) -> None:
            computed[row] = upto
            pending[row] += 1

        self.advance_plain: Callable[[int, int], None] = advance

    def advance_one(self, row: int, num_tokens: int) -> bool:
        """Count that a step computes ``num_tokens`` tokens of one request. Returns whether the step
        then samples the request's next token."""
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
        """Append sampled tokens to sequences. Returns the new ``num_tokens`` of their rows.

        ``sequences``: the token array of each row. ``tokens``: for each row one token or, with
        ``num_steps`` > 1, an array of ``num_steps`` tokens.
        """
        put: Callable[..., None] = array.append if num_steps == 1 else array.extend
        more = ONE if num_steps == 1 else np.int32(num_steps)
        deque(map(put, sequences, tokens), maxlen=0)
        self.num_tokens.all[rows] = known = self.num_tokens.all[rows] + more
        self.num_pending.all[rows] -= more
        return known

    def append_one(self, row: int, sequence: array[int], tokens: list[int]) -> int:
        """Append the tokens that a step sampled for one request: several, if drafts were accepted.
        Returns the request's new ``num_tokens``."""
        sequence.extend(tokens)
        self.num_tokens.at[row] = known = self.num_tokens.at[row] + len(tokens)
        self.num_pending.at[row] -= 1
        return known

    def launch(self, rows: NDArray[np.intp]) -> None:
        """Count one step in flight more for each of these requests."""
        if len(rows) > FEW:
            self.in_flight.all[rows] += ONE
        else:
            for row in rows.tolist():
                self.in_flight.at[row] += 1

    def land(self, rows: NDArray[np.intp]) -> None:
        """Count one step in flight less for each request, when its result or failure arrives."""
        if len(rows) > FEW:
            self.in_flight.all[rows] -= ONE
        else:
            for row in rows.tolist():
                self.in_flight.at[row] -= 1

    def take_back(self, rows: NDArray[np.intp], num_tokens: Counts) -> None:
        """Subtract rejected drafts: the last ``num_tokens`` computed tokens of each request."""
        self.num_computed.all[rows] -= num_tokens

    def start_from(self, row: int, num_computed: int) -> None:
        """Set how many of a request's tokens have KV already when it starts."""
        self.num_computed.at[row] = num_computed

    def restart(self, row: int) -> None:
        """Count no token of a request as computed, and make results of steps in flight invalid."""
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
