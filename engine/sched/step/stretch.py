"""Stretches: steps that only repeat, found and settled without planning each of them.

A simulation spends most of its steps on decodes among which nothing happens. Such steps are known
in advance: one token for each running request, blocks in order of rank where a table grows. They
end with the step before the first in which anything could be otherwise.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import repeat

import numpy as np

from engine.messages.step import Stretch
from engine.sched.plugins.hooks import Guard
from engine.sched.request import ONE, Request
from engine.sched.roster import Cause, RunningColumns
from engine.sched.step.builder import Step
from engine.sched.step.intake import Intake
from engine.sched.step.settle import Members

# A scheduler that overrides one of these plans each step itself.
STEP_PARTS = (
    *("schedule", "serve", "begin_step", "offers", "tokens_for", "secure", "grant", "preempt"),
    *("seal", "update_from_output"),
)


class Stretches:
    """Finds and settles them. The state behind a stretch is the one behind its steps."""

    def __init__(self, intake: Intake, guard: Guard, *, is_open: bool) -> None:
        self._is_open = is_open
        self._config = intake.config
        self._settler = settler = intake.settler
        self._guard = guard
        self._timers = intake.timers
        self._roster = settler.roster
        self._kv = settler.kv
        self._view = settler.view
        self._step: Step | None = None  # of the stretch that was found
        self._places: list[int] = []
        self._version = -1  # of the running requests that have these places by rank

    def find(self, now: float, until: float, num_in_flight: int) -> Stretch | None:
        """The stretch that begins with the next step, after all that any of its steps asks."""
        roster, settler = self._roster, self._settler
        if (due := self._timers.next_time()) is not None:
            until = min(until, due)
        if now >= until or self._is_contested() or not self._is_steady(num_in_flight):
            return None
        self._view.now = now
        num_steps = self._guard.stable_steps(self._view)
        if num_steps < 1 or (step := self._first_step()) is None:
            return None
        table, columns, members = roster.table, *self._seated()
        rows = columns.rows
        starts, known = table.num_computed.all[rows], table.num_tokens.all[rows]
        pending = table.num_pending.all[rows]
        others = (pending != num_in_flight) | (known + pending != starts + ONE)
        others |= table.told.all[rows] == 0
        if members.only_client is None or np.count_nonzero(others):
            return None
        left = int(np.minimum.reduce(columns.limits - known))  # tokens until a request ends
        num_steps = int(min(num_steps, left - num_in_flight))
        num_steps = self._kv.most_repeats(rows, starts, num_steps)
        if min(num_steps, left - 1) < 1:
            return None
        self._step = step
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
        """Its steps were planned and computed; it was the last one found."""
        roster, settler, step = self._roster, self._settler, self._step
        assert step is not None, "no stretch was found"
        table, rows, num_steps = roster.table, stretch.rows, stretch.num_steps
        num_planned, num_before = stretch.num_planned, roster.running_rows.num_in_flight
        num_more = num_planned - num_steps  # in flight
        members = settler.appender.running_members()
        known = table.num_tokens.all[rows]
        new = array("i", [stretch.token]) * num_steps
        deque(map(array.extend, members.tokens, repeat(new)), maxlen=0)
        stretch.growth = self._kv.repeat(
            members.reqs,
            rows,
            stretch.starts,
            np.minimum(stretch.starts, known),
            self._order(),
            num_planned,
            num_steps if num_before else num_planned,  # by when a block is full and written
        )
        stretch.kv_usage = self._kv.usage
        table.num_tokens.all[rows] = known + np.int32(num_steps)
        table.num_computed.all[rows] = stretch.starts + np.int32(num_planned)
        if num_more:
            table.num_pending.all[rows] += ONE
            table.in_flight.all[rows] += ONE
        table.facts.last_token.all[rows] = stretch.ends[-1]
        if settler.ledger is not None:
            settler.ledger.on_tokens((req.user, num_steps) for req in members.reqs)
        roster.waits.close_each(stretch.begins.tolist(), step.closing_cause())
        roster.freed_slots = []
        counters = settler.counters
        counters.num_steps += num_planned
        counters.num_computed_steps += num_planned
        counters.num_scheduled_tokens += num_planned * len(rows)
        roster.running_rows.note_repeats(counters.num_steps, num_before + num_more)
        step.index = counters.num_steps
        table.considered.all[rows] = step.index
        if step.closed_by == Cause.BLOCKS:  # it was offered tokens
            table.considered.at[roster.waiting[0].row] = step.index
        view = self._view
        view.step, self._step = step, None
        view.now = float(stretch.begins[-1] if num_more else stretch.ends[-1])
        view.note_stretch(stretch, num_before, are_read=self._guard.overrides("on_step"))

    # -- helpers

    def _is_contested(self) -> bool:
        """Could a request that waits be offered a seat? The usual answer, before all is known."""
        roster = self._roster
        if not (len(roster.waiting) and roster.num_free_seats):
            return False
        is_full = len(roster.running) >= self._config.max_num_batched_tokens
        fits = self._kv.blocks_for(roster.waiting[0].num_tokens) <= self._kv.num_free
        return fits and not (is_full or self._guard.overrides("limits"))

    def _lacks_blocks(self, req: Request) -> bool:
        """Is this request, the first that waits, refused for lack of blocks in each of the steps?

        In them fewer blocks become free and none are given back, and what it finds in the cache
        may become less. So it is refused again, unless a running request publishes more of its
        prompt. ``keeps_headroom`` is not asked where not even the request itself fits.
        """
        if self._guard.overrides("admit") or not self._config.enable_chunked_prefill:
            return False
        kv = self._kv
        if req.num_pending or kv.missing(req, req.num_tokens) <= kv.num_free:
            return False
        return not kv.may_gain(req, self._roster.running_rows.list)

    def _is_steady(self, num_in_flight: int) -> bool:
        """Do the same requests run in all steps in flight, is none of them a prompt, was all said
        that is to be said, and is nobody to be asked in each step?"""
        roster, settler = self._roster, self._settler
        seated = roster.running_rows
        if not (self._is_open and seated.list and seated.are_in_flight(num_in_flight)):
            return False
        if self._guard.dynamic and self._view.step.new:  # they have the ranks of waiting ones
            return False
        return not (settler.has_ended or settler.resources.are_asked or roster.running_prompts())

    def _seated(self) -> tuple[RunningColumns, Members]:
        return self._roster.running_rows.columns, self._settler.appender.running_members()

    def _first_step(self) -> Step | None:
        """The step as it is when all decodes have their token; ``None`` if they do not all fit, or
        a waiting request would be offered some. What closes admission then does so in each step."""
        roster, guard, view = self._roster, self._guard, self._view
        step = Step(0, self._config.max_num_batched_tokens, roster)
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
        """The place by rank of each running request, in order of rows."""
        roster, seated = self._roster, self._roster.running_rows
        if self._version == seated.version and not self._guard.dynamic:
            return self._places
        self._places, self._version = np.argsort(roster.running.rows).tolist(), seated.version
        return self._places
