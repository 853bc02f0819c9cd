"""Numbers of many requests as arrays, for what a policy says of all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.sched.request import Request
from engine.sched.table import Array, FloatColumn, Table

Whole = NDArray[np.int64]
Real = NDArray[np.float64]
Flags = NDArray[np.bool_]


class OwnNumbers:
    """A number of the policy's for each unfinished request, a float64."""

    __slots__ = ("_column",)

    def __init__(self, column: FloatColumn) -> None:
        self._column = column

    def __getitem__(self, req: Request) -> float:
        return self._column.at[req.row]

    def __setitem__(self, req: Request, value: float) -> None:
        self._column.at[req.row] = value

    def put(self, columns: Columns, values: Array | float) -> None:
        """One value for all of these requests, or an array with one for each."""
        self._column.all[columns.rows] = values


class Columns:
    """Arrays with a place for each of some requests, in their order; of this moment.

    Names are those of ``Request``. Counts are int64, times float64 seconds on the engine's clock.
    Each array is made at its first use, and is to be read only.
    """

    def __init__(
        self,
        rows: NDArray[np.intp],
        table: Table,
        predict: Callable[[Columns], Whole],
        cached_prefixes: Callable[[Columns], Whole],
        requests: Callable[[NDArray[np.intp]], list[Request]],
    ) -> None:
        self.rows = rows
        """Of the table, in which no two unfinished requests share one."""
        self._table = table
        self._predict = predict
        self._cached_prefixes = cached_prefixes
        self.requests_of = requests
        """The requests in some of the rows."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def requests(self) -> list[Request]:
        """The requests themselves."""
        return self.requests_of(self.rows)

    def __getitem__(self, places: Any) -> Columns:
        """Those at these places: a mask, a slice or an array of indices."""
        return Columns(
            self.rows[places], self._table, self._predict, self._cached_prefixes, self.requests_of
        )

    def request(self, place: int) -> Request:
        """The one at this place."""
        return self.requests_of(self.rows[[place]])[0]

    # -- constants

    @cached_property
    def arrival(self) -> Whole:
        """Number of arrival."""
        return self._table.facts.arrival.all[self.rows]

    @cached_property
    def arrival_time(self) -> Real:
        return self._table.facts.arrival_time.all[self.rows]

    @cached_property
    def priority(self) -> Whole:
        """Smaller is more urgent."""
        return self._table.facts.priority.all[self.rows]

    @cached_property
    def user(self) -> Whole:
        """A number for each user, the same for all requests of one."""
        return self._count(self._table.facts.user.all)

    def heads(self) -> dict[int, Request]:
        """The first request of each user, by the user's number, in their order here."""
        first = np.full(len(self._table.facts.users), -1)
        first[self.user[::-1]] = np.arange(len(self) - 1, -1, -1)
        places = np.sort(first[first >= 0])
        return dict(zip(self.user[places].tolist(), self[places].requests, strict=True))

    @cached_property
    def deadline(self) -> Real:
        """inf for a request without one."""
        return self._table.facts.deadline.all[self.rows]

    @cached_property
    def tbt(self) -> Real:
        """Seconds between tokens; inf for a request that says nothing of it."""
        return self._table.facts.tbt.all[self.rows]

    @cached_property
    def num_prompt(self) -> Whole:
        return self._count(self._table.num_prompt.all)

    @cached_property
    def max_total(self) -> Whole:
        """Length at which the request ends."""
        return self._count(self._table.limit.all)

    # -- what moves

    @cached_property
    def num_tokens(self) -> Whole:
        """Known tokens: prompt and settled outputs."""
        return self._count(self._table.num_tokens.all)

    @cached_property
    def num_output(self) -> Whole:
        """Settled output tokens."""
        return self.num_tokens - self.num_prompt

    @cached_property
    def num_computed(self) -> Whole:
        """Tokens whose KV is written or being written."""
        return self._count(self._table.num_computed.all)

    @cached_property
    def num_pending(self) -> Whole:
        """Tokens sampled in steps in flight."""
        return self._count(self._table.num_pending.all)

    @cached_property
    def num_uncomputed(self) -> Whole:
        """Tokens that could be computed now; 0 once the last token is in flight."""
        upto = self.num_tokens + self.num_pending
        return np.where(upto >= self.max_total, 0, upto - self.num_computed)

    @cached_property
    def num_preempted(self) -> Whole:
        return self._count(self._table.facts.num_preempted.all)

    @cached_property
    def is_waiting(self) -> Flags:
        waiting: Flags = self._table.facts.is_waiting.all[self.rows] != 0
        return waiting

    @cached_property
    def first_token_time(self) -> Real:
        """NaN before the first token was settled."""
        return self._table.facts.first_token.all[self.rows]

    @cached_property
    def last_token_time(self) -> Real:
        """NaN before the first token was settled."""
        return self._table.facts.last_token.all[self.rows]

    # -- what others know of them

    @cached_property
    def predicted(self) -> Whole:
        """``view.predict`` of each."""
        return self._predict(self)

    @cached_property
    def cached_prefix(self) -> Whole:
        """Tokens that a waiting request would find in the cache; 0 for one that does not wait."""
        waits = self.is_waiting
        if waits.all():
            return self._cached_prefixes(self)
        found = np.zeros(len(self), dtype=np.int64)
        if waits.any():
            found[waits] = self._cached_prefixes(self[waits])
        return found

    def own(self, name: str, default: float = 0.0) -> Real:
        """What the policy keeps under this name: see ``view.own``."""
        return self._table.facts.own_column(name, default).all[self.rows]

    def _count(self, column: Array) -> Whole:
        return column[self.rows].astype(np.int64)
