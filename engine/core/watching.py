"""Shows which requests a core has, why they wait, and what its steps compute.

A step is recorded only while somebody watches: ``CoreWatch`` then puts itself between the step loop
and its executor, and leaves when nobody has looked for some seconds.

    look ──> EngineCore ── launch(plan), collect ──> WatchedExecutor ──> executor
"""

from __future__ import annotations

import heapq
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

from engine.core.engine_core import EngineCore, Executor
from engine.messages.stats import RankUse
from engine.messages.step import Column, Masks, StepPlan, StepResult
from engine.messages.watch import State, WatchedCore, WatchedRequest, WatchedStep
from engine.sched.request import Request, Status
from engine.sched.roster import Cause
from engine.sched.scheduler import Scheduler

WATCH_SECONDS = 5.0  # without a look, after which steps are no longer recorded
MOST_STEPS = 600  # kept until somebody looks
SHORT_SECONDS = 0.1  # steps that end within this time are recorded together
MOST_NAMED = 32  # requests of a step that are named, those with most tokens
STATES: dict[Status, State] = {
    Status.RUNNING: "running",
    Status.WAITING: "waiting",
    Status.PARKED: "parked",
}


@dataclass
class RecordedStep:
    """A step, or several short ones in a row."""

    number: int  # of the last one
    tokens: dict[str, int]  # by request, those with most tokens
    num_others: int  # tokens of all other requests
    causes: dict[str, int]  # most requests that waited at one time
    began: float = 0.0
    seconds: float = 0.0
    num_steps: int = 1

    def add(self, later: RecordedStep) -> None:
        """Add a step that followed."""
        self.number = later.number
        self.num_steps += later.num_steps
        self.seconds += later.seconds
        self.num_others += later.num_others
        for name, num in later.tokens.items():
            self.tokens[name] = self.tokens.get(name, 0) + num
        for cause, num in later.causes.items():
            self.causes[cause] = max(num, self.causes.get(cause, 0))

    def shown(self, now: float, places: dict[str, int]) -> WatchedStep:
        """The message about it. places: the place of each name, to which new ones are added."""
        largest = heapq.nlargest(MOST_NAMED, self.tokens.items(), key=itemgetter(1))
        named = sum(num for _, num in largest)
        return WatchedStep(
            self.number,
            self.num_steps,
            max(0.0, now - self.began),
            self.seconds,
            [places.setdefault(name, len(places)) for name, _ in largest],
            [num for _, num in largest],
            self.num_others + sum(self.tokens.values()) - named,
            self.causes,
        )


class CoreWatch:
    """Answers those who watch a core, and records its steps for them. ``methods`` are the utilities
    that clients call. A custom scheduler shows its statistics and numbers of tokens only."""

    def __init__(
        self,
        core: EngineCore,
        clock: Callable[[], float],
        *,
        watch_seconds: float = WATCH_SECONDS,
        ranks: Callable[[], list[RankUse]] = list,
    ) -> None:
        """ranks: returns what the ranks of the core do."""
        self._core = core
        self._clock = clock
        self._seconds = watch_seconds
        self._ranks = ranks
        inner = getattr(core.scheduler, "inner", core.scheduler)  # a step log wraps the scheduler
        self._scheduler = inner if isinstance(inner, Scheduler) else None
        self._core_id = secrets.token_hex(8)
        self._until = 0.0
        self._steps: deque[RecordedStep] = deque(maxlen=MOST_STEPS)
        self._num_seen = 0  # number of the newest step that somebody has seen
        self._last_plan: StepPlan | None = None

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        return {"watch": self.look}

    def look(
        self, after: Mapping[str, int] | None, num_oldest: int, request_ids: Sequence[str] = ()
    ) -> WatchedCore:
        """The core at this moment: its ``num_oldest`` oldest requests, those with these ids, and
        the steps since the last look.

        after: the last step that is known of each core, by ``core_id``; ``None``: no steps are
        wanted, so none are recorded."""
        now = self._clock()
        names: dict[str, int] = {}
        steps: list[WatchedStep] = []
        if after is not None:
            self._begin(now)
            last = after.get(self._core_id, 0)
            steps = [step.shown(now, names) for step in self._steps if step.number > last]
            self._num_seen = steps[-1].number if steps else self._num_seen
        last_rows = set() if self._last_plan is None else set(self._last_plan.rows.tolist())
        found = [
            self._request(req, now, last_rows) for req in self._wanted(num_oldest, request_ids)
        ]
        stats = self._core.scheduler.make_stats()
        if stats is not None:
            stats.ranks = self._ranks()
        num_blocks = 0 if self._scheduler is None else self._scheduler.kv.num_usable
        return WatchedCore(self._core_id, num_blocks, stats, found, list(names), steps)

    def planned(self, plan: StepPlan) -> RecordedStep | None:
        """Record a plan that is about to be launched: whose tokens it computes, and why other
        requests wait. ``None`` if it computes nothing, or if nobody watches any more."""
        if self._clock() > self._until:
            self._end()
            return None
        if not plan.num_tokens:
            return None
        scheduler = self._scheduler
        if scheduler is None:
            return RecordedStep(plan.step, {}, plan.num_tokens, {})
        self._last_plan = plan
        rows, counts = plan.rows, plan.counts
        if len(rows) > MOST_NAMED:
            largest = (-counts).argsort(kind="stable")[:MOST_NAMED]
            rows, counts = rows[largest], counts[largest]
        names = [req.request_id for req in scheduler.roster.requests(rows)]
        tokens = dict(zip(names, counts.tolist(), strict=True))
        others = plan.num_tokens - sum(tokens.values())
        return RecordedStep(plan.step, tokens, others, scheduler.roster.num_waiting_by_cause())

    def settled(self, step: RecordedStep, seconds: float) -> None:
        """Record that a step has been computed, in this many seconds. Short ones are added to the
        step before, unless somebody has seen that already."""
        step.began = self._clock() - seconds  # with two steps in flight, later than its launch
        step.seconds = seconds
        last = self._steps[-1] if self._steps else None
        is_open = last is not None and last.number > self._num_seen
        if last is not None and is_open and step.began + seconds < last.began + SHORT_SECONDS:
            last.add(step)
        else:
            self._steps.append(step)

    # -- helpers

    def _begin(self, now: float) -> None:
        if not isinstance(self._core.executor, WatchedExecutor):
            self._steps.clear()
            self._core.executor = WatchedExecutor(self._core.executor, self)
        self._until = now + self._seconds

    def _end(self) -> None:
        if isinstance(self._core.executor, WatchedExecutor):
            self._core.executor = self._core.executor.inner
        self._last_plan = None

    def _wanted(self, num_oldest: int, request_ids: Sequence[str]) -> Iterator[Request]:
        if self._scheduler is None:
            return
        by_id = self._scheduler.roster.by_id  # in order of arrival
        oldest = dict(islice(by_id.items(), num_oldest))
        yield from oldest.values()
        for name in request_ids:
            if name in by_id and name not in oldest:
                yield by_id[name]

    def _request(self, req: Request, now: float, last_rows: set[int]) -> WatchedRequest:
        assert self._scheduler is not None
        history, ledger = req.history, self._scheduler.roster.waits
        if req.status is Status.RUNNING:
            cause = self._why_left_out(req, self._scheduler, last_rows)
            waits = dict(history.waits)
            since = next((at for name, at in reversed(history.events) if name == "scheduled"), now)
        else:
            cause, waits = ledger.cause_of(req), ledger.waits_of(req, now)
            since = history.wait_from
        return WatchedRequest(
            req.request_id,
            STATES[req.status],
            req.priority,
            cause,
            max(0.0, now - since),
            max(0.0, now - req.arrival_time),
            req.num_prompt,
            req.num_computed,
            history.num_cached,
            req.num_output,
            waits,
        )

    def _why_left_out(self, req: Request, scheduler: Scheduler, last_rows: set[int]) -> str:
        """Why the last step has no tokens of this running request; empty if it has."""
        if not last_rows or req.row in last_rows or not req.num_uncomputed:
            return ""
        step = scheduler.view.step
        if req in step.short:
            return Cause.BLOCKS
        return Cause.TOKENS if step.is_full else Cause.POLICY


class WatchedExecutor(Executor[Any]):
    """Passes on everything to ``inner``, and reports each step to the watch."""

    def __init__(self, inner: Executor[Any], watch: CoreWatch) -> None:
        self.inner = inner
        self._watch = watch
        self._in_flight: dict[int, RecordedStep] = {}

    @property
    def capabilities(self) -> frozenset[str]:
        return self.inner.capabilities

    def launch(self, plan: StepPlan) -> Any:
        step = self._watch.planned(plan)
        if step is not None:
            self._in_flight[step.number] = step
        return self.inner.launch(plan)

    def preview(self, ticket: Any) -> Column | None:
        return self.inner.preview(ticket)

    def sample(self, ticket: Any, masks: Masks | None) -> None:
        self.inner.sample(ticket, masks)

    def collect(self, ticket: Any) -> StepResult:
        result = self.inner.collect(ticket)
        step = self._in_flight.pop(result.step, None)
        if step is not None:
            self._watch.settled(step, result.seconds)
        return result

    @property
    def methods(self) -> Collection[str]:
        return self.inner.methods

    def call(self, name: str, *args: Any) -> Any:
        return self.inner.call(name, *args)

    def shutdown(self) -> None:
        self.inner.shutdown()
