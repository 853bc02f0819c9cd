"""JumpingCore: an EngineCore that takes repeating steps in one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol

from engine.core.engine_core import EngineCore, Executor
from engine.sched.interface import SchedulerInterface, StepOutputs
from policylab.sim.jumps.scheduling import Stretches, can_jump
from policylab.sim.jumps.stretch import Stretch


class Repeats(Executor[Any], Protocol):
    """An executor that knows, without computing steps, how long they take and when requests end."""

    def repeat(self, stretch: Stretch, tickets: Sequence[Any]) -> list[Any]:
        """Take the steps of a stretch that begin before ``stretch.until`` and before any request
        ends.

        ``tickets``: those of the steps in flight, oldest first; each repeated step is launched
        after them and before the oldest is collected. Fills in the executor's fields of
        ``Stretch``, sets the clock to ``next_begin``, and returns the tickets of the steps then in
        flight: the same number, or one more, which is planned at ``next_begin``. If no step can be
        taken, nothing changes.
        """
        ...


class JumpingCore(EngineCore):
    """An engine core that jumps over repeating steps, with the same plans, block ids and times as
    single steps.

    ``scheduler`` is new, without requests. If it is no ``Scheduler``, or overrides a part of the
    step, every step is planned by itself. ``clock``: the scheduler's clock, in seconds.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        executor: Repeats,
        depth: int = 1,
        *,
        clock: Callable[[], float],
        jumps: bool = True,
    ) -> None:
        super().__init__(scheduler, executor, depth)
        self.stretch: Stretch | None = None
        """The steps that the last call of ``step`` jumped over; ``None`` if it jumped over none."""
        self._repeater = executor
        self._stretches: Stretches | None = None
        if jumps and can_jump(scheduler):
            self._stretches = Stretches(scheduler, clock)

    def step(self, until: float = inf) -> StepOutputs:
        """Jump over all repeating steps that begin before ``until``, then take one normal step.

        ``until`` is the time at which the next request is added, in seconds on the engine's clock.
        The steps jumped over are in ``stretch`` and have no other outputs, since no request starts
        or ends in them. If ``until`` comes within them, there is no further step, and {} is
        returned.
        """
        self.stretch = None
        if self._stretches is not None and len(self.flight) == self.depth - 1:
            self.stretch = self._jump(self._stretches, until)
            if self.stretch is not None and self.stretch.next_begin >= until:
                return {}
        return super().step()

    def _jump(self, stretches: Stretches, until: float) -> Stretch | None:
        """Take the repeating steps that come next in one pass, and return them; ``None`` if there
        are none."""
        stretch = stretches.find(until, [plan.step for plan, _ in self.flight])
        if stretch is None:
            return None
        tickets = self._repeater.repeat(stretch, [ticket for _, ticket in self.flight])
        if not stretch.num_steps:
            return None
        stretches.settle(stretch)
        plans = [plan for plan, _ in self.flight]
        count = stretch.num_planned
        plans += [stretch.plan(at) for at in range(max(0, count - len(tickets)), count)]
        self.flight = deque(zip(plans[len(plans) - len(tickets) :], tickets, strict=True))
        self.is_idle = False
        return stretch
