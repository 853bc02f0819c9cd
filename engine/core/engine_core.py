"""EngineCore: scheduler and executor, one step at a time. Knows the executor only as a protocol."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from engine.messages.step import StepPlan, StepResult
from engine.sched.interface import SchedulerInterface, StepOutputs


class Executor(Protocol):
    """Runs plans in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> Any:
        """Start a step (forward and sampler); returns a ticket for ``collect``."""

    def collect(self, ticket: Any) -> StepResult:
        """Wait for a launched step and copy what it brought, nothing else."""


class EngineCore:
    """Keeps up to ``depth`` steps in flight: 1 is synchronous, 2 plans while one is computed."""

    def __init__(self, scheduler: SchedulerInterface, executor: Executor, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.flight: deque[tuple[StepPlan, Any]] = deque()
        self.is_idle = False  # the last step found nothing to compute and nothing to settle

    def step(self) -> StepOutputs:
        """Launch what fits into the flight and settle its oldest step; {} when there is nothing."""
        while len(self.flight) < self.depth:
            plan = self.scheduler.schedule()
            if not isinstance(plan, StepPlan):  # a scheduler of one's own may forget to return it
                name = type(self.scheduler).__name__
                raise TypeError(
                    f"{name}.schedule() returned {plan!r:.80}, must return a StepPlan: a loop of "
                    "one's own ends with `return self.seal(step)`"
                )
            if plan.is_empty:
                break
            self.flight.append((plan, self.executor.launch(plan)))
        self.is_idle = not self.flight
        if self.is_idle:
            return self.scheduler.take_outputs()
        plan, ticket = self.flight.popleft()
        return self.scheduler.update_from_output(plan, self.executor.collect(ticket))

    @property
    def has_work(self) -> bool:
        """Is there anything to compute, to settle or to tell the worker?"""
        return bool(self.flight) or self.scheduler.has_requests()
