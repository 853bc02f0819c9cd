"""Arrays with one number per request, for policies that rank all requests in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.sched.request import Request
from engine.sched.table import Array, FloatColumn, Table

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Flags = NDArray[np.bool_]


class OwnNumbers:
    """A float that a policy stores for each unfinished request: ``numbers[req] = value``."""

    __slots__ = ("_column",)

    def __init__(self, column: FloatColumn) -> None:
        self._column = column

    def __getitem__(self, req: Request) -> float:
        return self._column.at[req.row]

    def __setitem__(self, req: Request, value: float) -> None:
        self._column.at[req.row] = value

    def put(self, columns: Columns, values: Array | float) -> None:
        """Set the numbers of all requests in ``columns``, to one value or to an array of values."""
        self._column.all[columns.rows] = values


class Columns:
    """Properties of some requests as arrays: entry i of each array belongs to request i.

    Properties have the names of ``Request``'s fields. Counts are int64, times float64 seconds on
    the engine's clock. Arrays are made at their first use, do not change later, and are
    read-only."""

    def __init__(
        self,
        rows: NDArray[np.intp],
        table: Table,
        predict: Callable[[Columns], IntArray],
        cached_prefixes: Callable[[Columns], IntArray],
        load_seconds: Callable[[Columns], FloatArray],
        requests: Callable[[NDArray[np.intp]], list[Request]],
    ) -> None:
        self.rows = rows
        """The row of each request in the scheduler's table; no other request gets it until this one
        ends."""
        self._table = table
        self._predict = predict
        self._cached_prefixes = cached_prefixes
        self._load_seconds = load_seconds
        self.requests_of = requests
        """Returns the requests in the given rows of the table."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def requests(self) -> list[Request]:
        """The requests, in the order of the arrays."""
        return self.requests_of(self.rows)

    def __getitem__(self, places: Any) -> Columns:
        """The columns of some of the requests, chosen by a mask, a slice or an array of indices."""
        return Columns(
            self.rows[places],
            self._table,
            self._predict,
            self._cached_prefixes,
            self._load_seconds,
            self.requests_of,
        )

    def request(self, place: int) -> Request:
        """The request at this index."""
        return self.requests_of(self.rows[[place]])[0]

    # -- constants

    @cached_property
    def arrival(self) -> IntArray:
        """Arrival number: 0, 1, 2, ... in the order in which requests were added."""
        return self._table.facts.arrival.all[self.rows]

    @cached_property
    def arrival_time(self) -> FloatArray:
        return self._table.facts.arrival_time.all[self.rows]

    @cached_property
    def priority(self) -> IntArray:
        """Priority; a smaller number is more urgent."""
        return self._table.facts.priority.all[self.rows]

    @cached_property
    def user(self) -> IntArray:
        """A number that identifies the user of each request."""
        return self._count(self._table.facts.user.all)

    def heads(self) -> dict[int, Request]:
        """The first request of each user in these columns, by user number."""
        first = np.full(len(self._table.facts.users), -1)
        first[self.user[::-1]] = np.arange(len(self) - 1, -1, -1)
        places = np.sort(first[first >= 0])
        return dict(zip(self.user[places].tolist(), self[places].requests, strict=True))

    @cached_property
    def adapter(self) -> IntArray:
        """A number that identifies the LoRA adapter of each request; -1 for the base model."""
        return self._count(self._table.facts.adapter.all)

    @cached_property
    def deadline(self) -> FloatArray:
        """Deadline in seconds on the engine's clock; inf for a request without a deadline."""
        return self._table.facts.deadline.all[self.rows]

    @cached_property
    def tbt(self) -> FloatArray:
        """Wanted seconds between output tokens (TBT); inf for a request without such a wish."""
        return self._table.facts.tbt.all[self.rows]

    @cached_property
    def num_prompt(self) -> IntArray:
        return self._count(self._table.num_prompt.all)

    @cached_property
    def max_total(self) -> IntArray:
        """The largest number of prompt plus output tokens that the request can reach."""
        return self._count(self._table.limit.all)

    # -- progress

    @cached_property
    def num_tokens(self) -> IntArray:
        """Number of prompt tokens plus output tokens from finished steps."""
        return self._count(self._table.num_tokens.all)

    @cached_property
    def num_output(self) -> IntArray:
        """Number of output tokens from finished steps."""
        return self.num_tokens - self.num_prompt

    @cached_property
    def num_computed(self) -> IntArray:
        """Number of tokens whose KV is computed, or is being computed by steps in flight."""
        return self._count(self._table.num_computed.all)

    @cached_property
    def num_pending(self) -> IntArray:
        """Number of tokens that steps in flight will sample."""
        return self._count(self._table.num_pending.all)

    @cached_property
    def num_uncomputed(self) -> IntArray:
        """Number of tokens that the next step could compute; 0 if no more are needed, because the
        request's last token is being sampled."""
        upto = self.num_tokens + self.num_pending
        return np.where(upto >= self.max_total, 0, upto - self.num_computed)

    @cached_property
    def num_preempted(self) -> IntArray:
        return self._count(self._table.facts.num_preempted.all)

    @cached_property
    def is_waiting(self) -> Flags:
        waiting: Flags = self._table.facts.is_waiting.all[self.rows] != 0
        return waiting

    @cached_property
    def first_token_time(self) -> FloatArray:
        """When the request got its first output token; NaN as long as it has none."""
        return self._table.facts.first_token.all[self.rows]

    @cached_property
    def last_token_time(self) -> FloatArray:
        """When the request got its latest output token; NaN as long as it has none."""
        return self._table.facts.last_token.all[self.rows]

    # -- predictions, the prefix cache and the policy's own numbers

    @cached_property
    def predicted(self) -> IntArray:
        """Predicted number of output tokens that each request will have in total."""
        return self._predict(self)

    @cached_property
    def cached_prefix(self) -> IntArray:
        """Tokens that a waiting request would find in the prefix cache; 0 for other requests."""
        waits = self.is_waiting
        if waits.all():
            return self._cached_prefixes(self)
        found = np.zeros(len(self), dtype=np.int64)
        if waits.any():
            found[waits] = self._cached_prefixes(self[waits])
        return found

    @cached_property
    def load_seconds(self) -> FloatArray:
        """Predicted seconds until each request's adapter can be used: 0 if it is in a slot of the
        device, and for the base model."""
        return self._load_seconds(self)

    def own(self, name: str, default: float = 0.0) -> FloatArray:
        """The numbers that the policy has stored with ``view.own(name)``; ``default`` where it
        stored none."""
        return self._table.facts.own_column(name, default).all[self.rows]

    def _count(self, column: Array) -> IntArray:
        return column[self.rows].astype(np.int64)
