"""Checks that a request must pass before it is queued."""

from __future__ import annotations

from engine.config.check import is_finite
from engine.config.sched import SchedulerConfig
from engine.errors import RefusedError, RequestError
from engine.kv.manager import KVManager
from engine.messages.check import in_use
from engine.messages.requests import AddRequest
from engine.sched.policy import Defer, Refuse
from engine.sched.request import Request
from engine.sched.step.settle import Settler
from engine.sched.step.timers import TimerKind, Timers


class Intake:
    """Refuses requests that could never run, whose id is in use, or for which a bounded queue has
    no room; queues the rest."""

    def __init__(self, config: SchedulerConfig, settler: Settler) -> None:
        self.timers = Timers()
        self._config = config
        self._settler = settler
        self._kv = settler.kv
        self._roster = settler.roster
        self._num_arrived = 0
        self._seconds_per_start = 0.0
        self._last_start: float | None = None

    def take(self, add: AddRequest) -> Request:
        """Queue a request. Raises ``RequestError``, or ``RefusedError``, and then keeps nothing."""
        self.check(add)
        config, roster, view = self._config, self._roster, self._settler.view
        req = Request(add, self._num_arrived, roster.table, max_model_len=config.max_model_len)
        self._num_arrived += 1
        self._kv.ensure_rows(roster.table.num_rows)
        policy, ledger = self._settler.policy, self._settler.ledger
        try:
            view.predict(req)  # a predictor raises for a missing input before a hook calls it
            verdict = policy.on_add(req, view)
            if isinstance(verdict, Refuse):
                self._settler.counters.num_refused += 1
                raise RefusedError(f"request {add.request_id!r} was refused: {verdict.reason}")
        except RequestError:
            self._kv.finish(req)  # the policy may have looked it up in the cache
            roster.table.give_back(req.row)
            raise
        if ledger is not None:
            ledger.on_add(req)
        roster.table.flags.at[req.row] = self._settler.resources.flags(req)
        req.rank = policy.rank(req, view)
        roster.add(req, view.now)
        req.history.events.append(("queued", view.now))
        self.timers.add_deadlines(req)
        self._settler.resources.added(req)
        if isinstance(verdict, Defer):
            roster.park(req, view.now, "deferred")
            self.timers.add(verdict.until, TimerKind.WAKE, req)
        return req

    def check(self, add: AddRequest) -> None:
        """Raise ``RequestError`` or ``RefusedError`` if the request cannot be taken."""
        if add.request_id in self._roster.by_id:
            raise in_use(add.request_id)
        check_times(add)
        check_can_run(add, self._config, self._kv)
        if objection := self._settler.resources.objection(add):
            raise RequestError(f"request {add.request_id!r}: {objection}")
        config, waiting = self._config, self._roster.num_queued
        if config.max_waiting_requests is not None and waiting >= config.max_waiting_requests:
            self._refuse(f"{waiting} requests wait already (max_waiting_requests)")
        tokens = len(add.prompt_token_ids) + self._roster.queued_tokens
        if config.max_waiting_tokens is not None and tokens > config.max_waiting_tokens:
            if not waiting:  # alone in the queue, a long prompt would be refused for ever
                return
            self._refuse(
                f"{tokens} prompt tokens would wait, the bound is {config.max_waiting_tokens} "
                "(max_waiting_tokens)"
            )

    def estimated_wait(self) -> float | None:
        """Seconds until a request that came now would start, from the pace of late ones."""
        if not self._seconds_per_start:
            return None
        return self._roster.num_queued * self._seconds_per_start

    def on_started(self, now: float) -> None:
        """A request left the queue for a seat; keeps the pace (smoothed over about 20)."""
        if self._last_start is not None:
            gap = now - self._last_start
            share = 0.05 if self._seconds_per_start else 1.0
            self._seconds_per_start += share * (gap - self._seconds_per_start)
        self._last_start = now

    def _refuse(self, why: str) -> None:
        self._settler.counters.num_refused += 1
        wait = self.estimated_wait()
        when = "later" if wait is None else f"in about {wait:.1f} s"
        raise RefusedError(f"the queue is full: {why}; try again {when}", wait)


def check_times(add: AddRequest) -> None:
    """Raise ``RequestError`` for an invalid time: requests could not be ordered by it."""
    for name in ("arrival_time", "deadline", "queue_deadline", "end_deadline"):
        time = getattr(add, name)
        if time is not None and not is_finite(time):
            raise RequestError(
                f"{name} of request {add.request_id!r} is {time!r:.80}, must be a finite number"
            )


def check_can_run(add: AddRequest, config: SchedulerConfig, kv: KVManager) -> None:
    """Raise ``RequestError`` for a request that could never finish, not even alone."""
    num_prompt = len(add.prompt_token_ids)
    if not 0 < num_prompt < config.max_model_len:
        raise RequestError(
            f"prompt has {num_prompt} tokens, must have 1 to {config.max_model_len - 1} "
            "(max_model_len less one for the output)"
        )
    # The KV of the last token is never needed.
    longest = min(num_prompt + add.max_tokens, config.max_model_len) - 1
    needed = kv.blocks_for(longest)
    if needed > kv.num_usable:
        raise RequestError(
            f"request {add.request_id!r} may grow to {longest} tokens = {needed} KV blocks, "
            f"but the whole pool has {kv.num_usable}; lower max_tokens or raise "
            "num_kv_blocks"
        )
