"""Stretches: the scheduler's side of simulating many identical decode steps in one call.

In such steps each running request gets one token, and KV blocks are taken in order of the policy's
ranks. A stretch of steps ends before the first step that could differ."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import count, repeat
from typing import TypeGuard

import numpy as np

from engine.sched.interface import PauseState, SchedulerInterface
from engine.sched.plugins.hooks import ReentryGuard, not_reentrant
from engine.sched.predict.cost import StepShape
from engine.sched.request import Request
from engine.sched.roster import Cause, RunningColumns, WaitLedger
from engine.sched.scheduler import Scheduler
from engine.sched.step.outputs import Members
from engine.sched.step_state import Step
from engine.sched.table import ONE
from policylab.sim.jumps.blocks import RepeatingKV
from policylab.sim.jumps.stable import stable_steps
from policylab.sim.jumps.stretch import Stretch

# A scheduler that overrides one of these must plan each step.
STEP_PARTS = (
    *("schedule", "serve", "begin_step", "offers", "tokens_for", "secure", "grant", "preempt"),
    *("seal", "update_from_output"),
)
# A resource that overrides one of these must be called in each decode step.
STEP_HOOKS = ("watches", "begin_step", "describe", "masks", "settle")


def can_jump(scheduler: SchedulerInterface) -> TypeGuard[Scheduler]:
    """True for a ``Scheduler`` whose class overrides no method that takes part in a step."""
    return isinstance(scheduler, Scheduler) and all(
        getattr(type(scheduler), part) is getattr(Scheduler, part) for part in STEP_PARTS
    )


class Stretches:
    """Finds stretches of identical decode steps and updates the scheduler as if it had planned each
    of them.

    ``scheduler`` must have no requests yet, and a ``RepeatingKV`` as its KV manager. ``clock``: the
    scheduler's clock, in seconds."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        assert isinstance(scheduler.kv, RepeatingKV) and not scheduler.roster.by_id
        self._scheduler = scheduler
        self._clock = clock
        self._kv = scheduler.kv
        self._settler = scheduler.settler
        self._guard = scheduler.guard
        self._roster = scheduler.roster
        self._view = scheduler.view
        self._waits = scheduler.roster.waits = RepeatedWaits()
        self._step: Step | None = None  # state of the first step of the stretch found
        self._in_flight: Sequence[int] = ()  # steps in flight then
        self._places: list[int] = []
        self._version = -1  # version of the running set for which ``_places`` holds

    @property
    def reentry(self) -> ReentryGuard:
        """The scheduler's guard against reentrant calls."""
        return self._scheduler.reentry

    @not_reentrant
    def find(self, until: float, in_flight: Sequence[int]) -> Stretch | None:
        """Find the identical decode steps that come next; ``None`` if the next step needs normal
        planning.

        No step of the stretch begins after ``until`` (seconds on the clock). ``in_flight``: numbers
        of the steps in flight, oldest first."""
        roster, settler, now = self._roster, self._settler, self._clock()
        if (due := self._scheduler.intake.timers.next_time()) is not None:
            until = min(until, due)
        if now >= until or self._is_contested() or not self._is_steady(in_flight):
            return None
        self._view.now = now
        num_steps = stable_steps(self._guard, self._view)
        if num_steps < 1 or (step := self._first_step()) is None:
            return None
        table, columns, members = roster.table, *self._seated()
        rows = columns.rows
        starts, known = table.num_computed.all[rows], table.num_tokens.all[rows]
        pending = table.num_pending.all[rows]
        others = (pending != len(in_flight)) | (known + pending != starts + ONE)
        others |= table.has_output.all[rows] == 0
        if members.only_client is None or np.count_nonzero(others):
            return None
        left = int(np.minimum.reduce(columns.limits - known))  # tokens until a request ends
        num_steps = int(min(num_steps, left - len(in_flight)))
        num_steps = self._kv.most_repeats(rows, starts, num_steps, is_alone=not in_flight)
        if min(num_steps, left - 1) < 1:
            return None
        self._step, self._in_flight = step, in_flight
        return Stretch(
            step=settler.counters.num_steps + 1,
            rows=rows,
            slots=columns.slots,
            generations=columns.generations,
            starts=starts,
            request_ids=members.ids,
            freed_slots=roster.freed_slots,
            max_planned=num_steps,
            max_steps=min(num_steps, left - 1),
            until=until,
        )

    def settle(self, stretch: Stretch) -> None:
        """Update the scheduler for the executed steps of ``stretch``, which ``find`` returned
        last."""
        roster, settler, step = self._roster, self._settler, self._step
        assert step is not None, "no stretch was found"
        table, rows, num_steps = roster.table, stretch.rows, stretch.num_steps
        num_planned, num_before = stretch.num_planned, len(self._in_flight)
        num_more = num_planned - num_steps  # still in flight
        members = settler.appender.running_members()
        known = table.num_tokens.all[rows]
        new = stretch.token if num_steps == 1 else array("i", [stretch.token]) * num_steps
        table.append(rows, members.tokens, repeat(new), num_steps)
        stretch.growth = self._kv.repeat(
            members.reqs,
            rows,
            stretch.starts,
            np.minimum(stretch.starts, known),
            self._order(),
            stretch.begins.tolist(),
            num_steps if num_before else num_planned,  # steps after which full blocks are published
        )
        table.advance(rows, num_planned)
        if num_more:
            table.launch(rows)
        table.facts.last_token.all[rows] = stretch.ends[-1]
        if settler.ledger is not None:
            settler.ledger.on_tokens((req.user, num_steps) for req in members.reqs)
        self._kv.set_time(float(stretch.begins[-1]))
        self._waits.close_each(stretch.begins.tolist(), step.closing_cause())
        roster.freed_slots = []
        self._count(stretch)
        step.index = settler.counters.num_steps
        table.considered.all[rows] = step.index
        if step.closed_by == Cause.BLOCKS:  # it was offered tokens
            table.considered.at[roster.waiting[0].row] = step.index
        view = self._view
        view.step, self._step = step, None
        view.now = float(stretch.begins[-1] if num_more else stretch.ends[-1])
        self._note_shapes(stretch, num_before)

    # -- helpers

    def _is_contested(self) -> bool:
        """Quick test of whether the first waiting request may be scheduled in the next step."""
        roster, config = self._roster, self._scheduler.config
        if not (len(roster.waiting) and roster.num_free_seats):
            return False
        is_full = len(roster.running) >= config.max_num_batched_tokens
        fits = self._kv.blocks_for(roster.waiting[0].num_tokens) <= self._kv.num_free
        return fits and not (is_full or self._guard.overrides("limits"))

    def _lacks_blocks(self, req: Request) -> bool:
        """True if the first waiting request, ``req``, lacks free KV blocks in every step of the
        stretch.

        This holds if it lacks them now and its prefix hit cannot grow, since the number of free
        blocks only falls during a stretch."""
        is_chunked = self._scheduler.config.enable_chunked_prefill
        if self._guard.overrides("admit") or not is_chunked:
            return False
        kv = self._kv
        if req.num_pending or kv.missing(req, req.num_tokens) <= kv.num_free:
            return False
        rows = self._roster.running_rows.list
        return not kv.may_gain(req, rows) and kv.only_takes(rows)

    def _is_steady(self, in_flight: Sequence[int]) -> bool:
        """True if the steps in flight and the next step have the same running requests, all of them
        decoding, and no plug-in needs a call per step."""
        roster, settler = self._roster, self._settler
        seated = roster.running_rows
        if not seated.list or self._scheduler.pause_state is not PauseState.UNPAUSED:
            return False
        if not all(map(seated.is_full_step, in_flight)):
            return False
        if (
            self._guard.dynamic and self._view.step.new
        ):  # new ones still have the ranks of waiting requests
            return False
        are_called = settler.resources.override(*STEP_HOOKS)
        return not (settler.has_ended or are_called or roster.running_prompts())

    def _seated(self) -> tuple[RunningColumns, Members]:
        return self._roster.running_rows.columns, self._settler.appender.running_members()

    def _first_step(self) -> Step | None:
        """Return the next step, in which each running request gets one token; ``None`` if the token
        budget is too small for that, or if a waiting request might be scheduled."""
        roster, guard, view = self._roster, self._guard, self._view
        step = Step(0, self._scheduler.config.max_num_batched_tokens, roster)
        limits, may_preempt = guard.limits(view), guard.waiting_may_preempt
        step.narrow(limits.max_tokens, limits.max_seqs)
        if not limits.admission:
            step.close(Cause.POLICY)
        elif not (step.num_free_seats or may_preempt):
            step.close(Cause.SEATS)
        step.tokens_left -= len(roster.running)
        step.plain_rows = roster.running_rows.columns.rows
        if step.tokens_left < 0:
            return None
        if not len(roster.waiting):
            return step
        if may_preempt or not step.admission_open:
            return None if may_preempt else step
        if guard.dynamic or guard.overrides("next_waiting"):
            return None
        if step.tokens_left and not self._lacks_blocks(roster.waiting[0]):
            return None
        if step.tokens_left:
            step.close(Cause.BLOCKS)
        return step

    def _order(self) -> list[int]:
        """The place in rank order of each running request, by ascending row in its table."""
        roster, seated = self._roster, self._roster.running_rows
        if self._version == seated.version and not self._guard.dynamic:
            return self._places
        self._places, self._version = np.argsort(roster.running.rows).tolist(), seated.version
        return self._places

    def _count(self, stretch: Stretch) -> None:
        """Add a stretch to the scheduler's counters and to its list of steps in flight."""
        counters, seated = self._settler.counters, self._roster.running_rows
        num_planned, num_steps = stretch.num_planned, stretch.num_steps
        counters.num_steps += num_planned
        counters.num_computed_steps += num_planned
        counters.num_scheduled_tokens += num_planned * len(stretch.rows)
        self._scheduler.num_in_flight += num_planned - num_steps
        planned = range(stretch.step, stretch.step + num_planned)
        for step in self._in_flight[:num_steps]:
            seated.pop_full_step(step)
        for step in planned[max(0, num_steps - len(self._in_flight)) :]:
            seated.add_full_step(step)

    def _note_shapes(self, stretch: Stretch, num_before: int) -> None:
        """Report each finished step's shape and duration to the policy's view, from which its cost
        model learns. ``num_before``: the number of steps in flight before the stretch."""
        view, seconds = self._view, stretch.seconds
        first = -num_before
        if self._guard.overrides("on_step"):
            for index, each in enumerate(seconds.tolist(), first):
                view.unread.append((shape_of, (stretch, index), each))
                view.read_steps()
            return
        latest = seconds[-(view.unread.maxlen or 0) :].tolist()
        steps = zip(repeat(stretch), count(first + stretch.num_steps - len(latest)), strict=False)
        view.unread.extend(zip(repeat(shape_of), steps, latest, strict=False))


def shape_of(step: tuple[Stretch, int], seconds: float) -> StepShape:
    """The shape of one step. ``step``: a stretch, and the index of the step in it."""
    stretch, index = step
    return stretch.shape(index, seconds)


class RepeatedWaits(WaitLedger):
    """A ledger of waiting times by cause, which one call can update for many steps."""

    def close_each(self, times: Sequence[float], cause: str) -> None:
        """Add the waiting time up to the last of ``times`` (steps, in seconds) to the total of
        ``cause``. The sum is bit-identical to that of one ``close`` call per step."""
        self.close(times[0], cause, ())
        since, total = times[0], self._totals.get(cause, 0.0)
        for now in times:
            if now != since:
                total, since = total + now - since, now
        if since != times[0]:
            self._totals = {**self._totals, cause: total}
            self._since = since
