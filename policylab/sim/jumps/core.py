"""JumpingCore: an EngineCore that simulates many identical decode steps in one call."""

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
    """An executor that can compute the times of many identical decode steps in one call."""

    def repeat(self, stretch: Stretch, tickets: Sequence[Any]) -> list[Any]:
        """Execute the steps of ``stretch`` in order, up to ``stretch.until`` or the end of a
        request.

        ``tickets``: the executor's handles of the steps in flight, oldest first. Returns the
        handles of the steps in flight afterwards, as many or one more. Fills in ``begins``,
        ``ends``, ``seconds``, ``next_begin`` and ``token`` of ``stretch``, and sets the clock to
        ``next_begin``. Changes nothing if no step can be executed."""
        ...


class JumpingCore(EngineCore):
    """An engine core that skips over runs of identical decode steps; plans, block ids and times are
    the same as if it took every step.

    ``scheduler`` must be new, without requests; if it is not a plain ``Scheduler``, no step is
    skipped. ``clock`` is the scheduler's clock, in seconds."""

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
        """Skip identical decode steps that begin before ``until``, then take one normal step and
        return its outputs.

        ``until`` is the arrival time of the next request, in seconds on the engine's clock. The
        skipped steps are stored in ``self.stretch``. If they last until ``until``, no normal step
        is taken and the result is empty."""
        self.stretch = None
        if self._stretches is not None and len(self.flight) == self.depth - 1:
            self.stretch = self._jump(self._stretches, until)
            if self.stretch is not None and self.stretch.next_begin >= until:
                return {}
        return super().step()

    def _jump(self, stretches: Stretches, until: float) -> Stretch | None:
        """Execute the next run of identical decode steps in one call; ``None`` if there is none."""
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
