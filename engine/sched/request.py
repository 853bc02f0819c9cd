"""Request: identity and constants; and the table of the moving numbers of every unfinished request.

Nothing is stored twice: a request reads its numbers from its row of the table. Only ``move``
changes the status.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf, isnan, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages.params import SamplingParams
from engine.messages.requests import (
    AddRequest,
    Finished,
    FinishReason,
    MediaItem,
    Started,
    code_of,
)

WATCHED = 1  # some resource wants to be asked in each step
SERIAL = 2  # while a token is being computed, no step computes the next one

Counts = NDArray[np.int32]
Array = NDArray[Any]


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
    """Small numbers for the users who have requests, so that vectors can tell them apart."""

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
        """The same for one row."""
        self.last_token.at[row] = now
        if isnan(self.first_token.at[row]):
            self.first_token.at[row] = now

    def own_column(self, name: str, default: float) -> FloatColumn:
        """The policy's column of this name, made when it is first asked for."""
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
        self.plain = LongColumn(num_rows)  # the last step in which the row was marked as plain
        self.considered = LongColumn(num_rows)  # the last step in which the request was offered
        self.stop_id = TableColumn(num_rows)  # the token that ends the request; -1 none, -2 several
        self.facts = Facts(num_rows)
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
        self.slot.at[row] = self.considered.at[row] = self.facts.user.at[row] = -1
        self.alive.at[row] = 1
        return row

    def give_back(self, row: int) -> None:
        """Free a row to which nothing refers any more."""
        self.alive.at[row] = 0
        self.facts.leave(row)
        self._free.append(row)

    def _grow(self) -> None:
        num_rows = self.num_rows
        for value in vars(self).values():
            if isinstance(value, Column):
                value.grow()
        self.facts.grow()
        self._free.extend(range(2 * num_rows - 1, num_rows - 1, -1))


class Status(Enum):
    """Where a request is. Preempted is not a status: it waits, with ``num_preempted > 0``."""

    WAITING = "waiting"
    PARKED = "parked"  # out of the queue until ``wake`` is called
    RUNNING = "running"  # has a seat and blocks
    FINISHED = "finished"


LEGAL_MOVES = {
    Status.WAITING: {Status.RUNNING, Status.PARKED, Status.FINISHED},
    Status.PARKED: {Status.WAITING, Status.FINISHED},
    Status.RUNNING: {Status.WAITING, Status.FINISHED},
    Status.FINISHED: set(),
}


@dataclass(slots=True)
class RequestHistory:
    """What has happened to a request. Times are seconds on the engine's clock."""

    num_preempted: int = 0
    num_cached: int = 0  # tokens found in the cache when first admitted
    scheduled_time: float | None = None
    events: list[tuple[str, float]] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)  # seconds by cause
    queue_seconds: float = 0.0
    wait_from: float = 0.0
    own_cause: str | None = None  # its own cause of waiting, if it has one now
    totals_at_entry: dict[str, float] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None  # for the engine that continues with its KV
    counters: dict[str, int] = field(default_factory=dict)  # what resources counted of it

    def count(self, name: str, num: int) -> None:
        """Add to a counter of its own."""
        self.counters[name] = self.counters.get(name, 0) + num


def as_array(tokens: list[int]) -> array[int]:
    """Packed first: twice as fast as one by one."""
    packed = array("i")
    packed.frombytes(struct.pack(f"{len(tokens)}i", *tokens))
    return packed


class Request:
    """One sequence to generate, from the moment it is added until its last step has retired.

    ``tokens`` holds the prompt and all settled outputs. Policies read; only the scheduler writes.
    """

    __slots__ = (
        "add",
        "arrival",
        "cache_salt",
        "history",
        "num_prompt",
        "own_rank",
        "reads_cache",
        "request_id",
        "row",
        "status",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(self, add: AddRequest, arrival: int, table: Table, *, max_model_len: int) -> None:
        self.add = add
        self.request_id = add.request_id
        self.arrival = arrival  # number of arrival: breaks every tie
        self.table = table
        self.tokens = as_array(add.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.cache_salt = add.cache_salt
        self.reads_cache = add.params.prompt_logprobs is None
        self.status = Status.WAITING
        self.own_rank: tuple[Any, ...] | None = ()
        self.history = RequestHistory()
        self.row = table.take()
        table.facts.enter(self.row, arrival, add)
        table.num_tokens.at[self.row] = table.num_prompt.at[self.row] = self.num_prompt
        table.limit.at[self.row] = min(self.num_prompt + add.max_tokens, max_model_len)
        table.client.at[self.row] = add.client_index
        self.stop_ids = stops = list(dict.fromkeys(add.eos_token_ids + add.params.stop_token_ids))
        table.stop_id.at[self.row] = -2 if stops else -1
        if len(stops) == 1 and 0 <= stops[0] < 1 << 31 and not add.params.min_tokens:
            table.stop_id.at[self.row] = stops[0]

    @property
    def rank(self) -> tuple[Any, ...]:
        """What its policy said last. Ranks given in columns are read from the table."""
        rank, row = self.own_rank, self.row
        if rank is not None:
            return rank
        return tuple([column.at[row] for column in self.table.facts.ranks])

    @rank.setter
    def rank(self, rank: tuple[Any, ...]) -> None:
        self.own_rank = rank

    # -- identity

    @property
    def params(self) -> SamplingParams:
        return self.add.params

    @property
    def priority(self) -> int:
        """Smaller is more urgent."""
        return self.add.priority

    @property
    def user(self) -> str:
        return self.add.user

    @property
    def arrival_time(self) -> float:
        """Seconds on the engine's clock."""
        return self.add.arrival_time

    @property
    def deadline(self) -> float | None:
        return self.add.deadline

    @property
    def tbt(self) -> float | None:
        """Seconds between output tokens that its reader wants, or was promised."""
        return self.add.tbt

    @property
    def first_token_time(self) -> float | None:
        """When its first output token was settled, in seconds on the engine's clock."""
        time = self.table.facts.first_token.at[self.row]
        return time if time == time else None

    @property
    def last_token_time(self) -> float | None:
        """The same of the latest one."""
        time = self.table.facts.last_token.at[self.row]
        return time if time == time else None

    @property
    def hints(self) -> dict[str, Any]:
        """What the caller wants the policy to know."""
        return self.add.hints or {}

    @property
    def adapter(self) -> str | None:
        """Name of its LoRA adapter."""
        return self.add.adapter

    @property
    def media(self) -> list[MediaItem]:
        """Images and the like in its prompt, in order of offset."""
        return self.add.media

    @property
    def num_preempted(self) -> int:
        return self.history.num_preempted

    @property
    def num_cached(self) -> int:
        """Tokens found in the cache when it first started; 0 before."""
        return self.history.num_cached

    # -- counts

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and settled outputs."""
        return self.table.num_tokens.at[self.row]

    @property
    def num_output(self) -> int:
        """Settled output tokens."""
        return self.table.num_tokens.at[self.row] - self.num_prompt

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is written or being written."""
        return self.table.num_computed.at[self.row]

    @property
    def num_pending(self) -> int:
        """Tokens sampled in steps in flight."""
        return self.table.num_pending.at[self.row]

    @property
    def num_uncomputed(self) -> int:
        """Tokens that could be computed now; 0 once the last token is in flight."""
        table, row = self.table, self.row
        upto = table.num_tokens.at[row] + table.num_pending.at[row]
        return 0 if upto >= table.limit.at[row] else upto - table.num_computed.at[row]

    @property
    def max_total(self) -> int:
        """Length at which the request ends."""
        return self.table.limit.at[self.row]

    @property
    def slot(self) -> int:
        """Index in the worker's tables, -1 without a seat."""
        return self.table.slot.at[self.row]

    @property
    def considered(self) -> int:
        """The last step in which it was offered or evicted."""
        return self.table.considered.at[self.row]

    @property
    def is_waiting(self) -> bool:
        return self.status is Status.WAITING

    @property
    def is_serial(self) -> bool:
        """A resource wants it in only one step at a time."""
        return self.table.flags.at[self.row] & SERIAL != 0

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def move(self, status: Status) -> None:
        """Change status; only the scheduler may."""
        assert status in LEGAL_MOVES[self.status], f"{self} cannot become {status.value}"
        self.status = status
        self.table.facts.is_waiting.at[self.row] = status is Status.WAITING

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value})"


class End(NamedTuple):
    """Why a request ends that is not complete. ``code``: None means that of the reason."""

    req: Request
    reason: FinishReason
    message: str
    code: str | None = None


def start_of(req: Request, index: int, now: float) -> Started:
    """History of a running request; a copy, since it goes on changing."""
    history = req.history
    return Started(
        index,
        history.num_cached,
        history.scheduled_time or now,
        history.num_preempted,
        dict(history.waits),
        list(history.events),
    )


def end_of(
    req: Request,
    index: int,
    reason: FinishReason,
    stop_reason: int | None = None,
    end: End | None = None,
) -> Finished:
    """The end of a request, and what has happened to it; ``end``: of one that is not complete."""
    history = req.history
    return Finished(
        index,
        reason,
        stop_reason,
        "" if end is None else end.message,
        num_preemptions=history.num_preempted,
        waits=history.waits,
        events=history.events,
        kv_transfer_params=history.kv_transfer_params,
        counters=history.counters,
        code=code_of(reason, None if end is None else end.code),
    )
