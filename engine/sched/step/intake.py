"""Checks, ranks and queues new requests; keeps timers that wake or end requests."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from heapq import heapify, heappop, heappush

from engine.config.sched import SchedulerConfig
from engine.errors import PromptTooLongError, RefusedError, RequestError
from engine.kv.manager import KVManager
from engine.messages.requests import AddRequest, check_times, in_use
from engine.sched.policy import Defer, Refuse
from engine.sched.request import Request
from engine.sched.step.settle import Settler

FEW = 64  # up to this many timers, those of ended requests are not removed


class Intake:
    """Queues new requests. It refuses a request that can never run, an id in use, and any request
    while the queue is full."""

    def __init__(self, config: SchedulerConfig, settler: Settler) -> None:
        self.timers = Timers()
        self.config = config
        self.settler = settler
        self._kv = settler.kv
        self._roster = settler.roster
        self._num_arrived = 0
        self._seconds_per_start = 0.0
        self._last_start: float | None = None

    def take(self, add: AddRequest) -> Request:
        """Queue a request. If ``RequestError`` or ``RefusedError`` is raised, nothing changes."""
        self.check(add)
        config, roster, view = self.config, self._roster, self.settler.view
        req = Request(add, self._num_arrived, roster.table, max_model_len=config.max_model_len)
        self._num_arrived += 1
        self._kv.ensure_rows(roster.table.num_rows)
        policy, ledger = self.settler.policy, self.settler.ledger
        try:
            view.predict(req)  # raises now, not in a hook, if the predictor lacks an input
            verdict = policy.on_add(req, view)
            if isinstance(verdict, Refuse):
                self.settler.counters.num_refused += 1
                message = f"request {add.request_id!r} was refused: {verdict.reason}"
                raise RefusedError(message, code="refused")
        except RequestError:
            self._kv.finish(req)  # the policy may have looked up its prefix
            roster.table.give_back(req.row)
            raise
        if ledger is not None:
            ledger.on_add(req)
        roster.table.flags.at[req.row] = self.settler.resources.flags(req)
        req.rank = policy.rank(req, view)
        roster.add(req, view.now)
        req.history.events.append(("queued", view.now))
        self.timers.add_deadlines(req)
        self.settler.resources.added(req)
        if isinstance(verdict, Defer):
            roster.park(req, view.now, "deferred")
            self.timers.add(verdict.until, TimerKind.WAKE, req)
        return req

    def check(self, add: AddRequest) -> None:
        """Raise ``RequestError`` for an invalid request, ``RefusedError`` if the queue is full."""
        if add.request_id in self._roster.by_id:
            raise in_use(add.request_id)
        check_times(add)
        check_can_run(add, self.config, self._kv)
        self.settler.resources.check(add)
        config, waiting = self.config, self._roster.num_queued
        limit = config.max_waiting_requests
        if limit is not None and waiting >= limit:
            self._refuse(
                f"{waiting} requests are waiting, the limit is {limit} (max_waiting_requests)"
            )
        tokens = len(add.prompt_token_ids) + self._roster.queued_tokens
        if config.max_waiting_tokens is not None and tokens > config.max_waiting_tokens:
            if not waiting:  # else a long prompt would always be refused
                return
            self._refuse(
                f"{tokens} prompt tokens would wait, the limit is {config.max_waiting_tokens} "
                "(max_waiting_tokens)"
            )

    def estimated_wait(self) -> float | None:
        """Seconds until a request added now would start, at the recent rate of starts."""
        if not self._seconds_per_start:
            return None
        return self._roster.num_queued * self._seconds_per_start

    def on_started(self, now: float) -> None:
        """Update the rate of starts, smoothed over about 20 starts."""
        if self._last_start is not None:
            gap = now - self._last_start
            share = 0.05 if self._seconds_per_start else 1.0
            self._seconds_per_start += share * (gap - self._seconds_per_start)
        self._last_start = now

    def _refuse(self, why: str) -> None:
        self.settler.counters.num_refused += 1
        wait = self.estimated_wait()
        when = "later" if wait is None else f"in about {wait:.1f} s"
        raise RefusedError(f"the queue is full: {why}; try again {when}", wait)


def check_can_run(add: AddRequest, config: SchedulerConfig, kv: KVManager) -> None:
    """Raise ``RequestError`` for a request that could never finish, not even alone."""
    num_prompt, is_pooled = len(add.prompt_token_ids), add.pooling is not None
    most = config.max_model_len - (not is_pooled)
    if not 0 < num_prompt <= most:
        raise (PromptTooLongError if num_prompt else RequestError)(
            f"the prompt has {num_prompt} tokens; it must have 1 to {most} "
            f"(max_model_len{'' if is_pooled else ' minus one for the output'})",
            param="prompt_token_ids",
        )
    # The KV of the last token is never needed.
    longest = num_prompt if is_pooled else min(num_prompt + add.max_tokens, most + 1) - 1
    needed = kv.blocks_for(longest)
    if needed > kv.num_usable:
        raise RequestError(
            f"request {add.request_id!r} may grow to {longest} tokens and need {needed} KV blocks, "
            f"but there are only {kv.num_usable}; lower max_tokens or raise num_kv_blocks",
            param="max_tokens",
        )


class TimerKind(Enum):
    """What a timer does: wake a deferred request, or end a request that missed its deadline to
    start or to finish."""

    WAKE = "wake"
    START_BY = "started"
    END_BY = "finished"


class Timers:
    """Timers in seconds on the engine's clock. Timers of ended requests are ignored."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, TimerKind, Request]] = []
        self._num_added = 0  # orders timers of the same time
        self._clean_at = FEW

    def add(self, time: float, kind: TimerKind, req: Request) -> None:
        if len(self._heap) >= self._clean_at:  # most may belong to requests that have ended
            self._heap = [entry for entry in self._heap if not entry[-1].is_finished]
            heapify(self._heap)
            self._clean_at = max(FEW, 2 * len(self._heap))
        heappush(self._heap, (time, req.arrival, self._num_added, kind, req))
        self._num_added += 1

    def add_deadlines(self, req: Request) -> None:
        """Add timers for the deadlines of a request."""
        if req.add.queue_deadline is not None:
            self.add(req.add.queue_deadline, TimerKind.START_BY, req)
        if req.add.end_deadline is not None:
            self.add(req.add.end_deadline, TimerKind.END_BY, req)

    def due(self, now: float) -> Iterator[tuple[TimerKind, Request]]:
        """Remove and return the timers that are due, in order of time."""
        while self._heap and self._heap[0][0] <= now:
            *_, kind, req = heappop(self._heap)
            if not req.is_finished:
                yield kind, req

    def next_time(self) -> float | None:
        """The time of the next timer, or None."""
        while self._heap and self._heap[0][-1].is_finished:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
