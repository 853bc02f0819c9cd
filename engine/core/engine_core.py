"""EngineCore: scheduler and executor, one step at a time. Knows the executor only as a protocol."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Protocol, TypeVar

from engine.messages.step import Column, Masks, StepPlan, StepResult
from engine.sched.interface import SchedulerInterface, StepOutputs

Ticket = TypeVar("Ticket")


class Executor(Protocol[Ticket]):
    """Computes plans in the order in which they are launched; a ticket is a launched step."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Parts of a plan that it can compute, and whether it proposes drafts (names in
        ``engine.messages.step.CAPABILITIES``)."""
        ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step: forward pass and, unless the plan has a ``MaskPart``, the draw."""
        ...

    def preview(self, ticket: Ticket) -> Column | None:
        """``MaskPart.drawn`` of a launched step; ``None`` where it would have to be waited for."""
        ...

    def sample(self, ticket: Ticket, masks: Masks | None) -> None:
        """Start the draw of a step whose plan has a ``MaskPart``, before the next is launched.

        ``None``: there are no masks; the rows that wanted one fail.
        """
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a launched step and copy what it brought, nothing else."""
        ...

    @property
    def methods(self) -> Collection[str]:
        """Names that ``call`` knows."""
        ...

    def call(self, name: str, *args: Any) -> Any:
        """A method by name, between two steps. Raises ``ConfigError`` for one that is not there."""
        ...

    def shutdown(self) -> None:
        """Let go of model and memory; harmless when repeated."""
        ...


class EngineCore:
    """Keeps up to ``depth`` steps in flight: 1 is synchronous, 2 plans while one is computed.

        launch N+1 (forward) ─> collect N, settle N ─> [masks of N+1 ─> draw N+1] ─> launch N+2 ...

    A step whose plan has a ``MaskPart`` is drawn when all steps before it are settled, and nothing
    is launched after it until then.
    """

    def __init__(
        self, scheduler: SchedulerInterface, executor: Executor[Any], depth: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.flight: deque[tuple[StepPlan, Any]] = deque()
        self.is_idle = False  # the last step found nothing to compute and nothing to settle
        self._has_undrawn = False  # the newest step in flight waits for its masks

    def step(self) -> StepOutputs:
        """Launch what fits into the flight and settle its oldest step; {} when there is nothing."""
        while len(self.flight) < self.depth:
            self._draw_if_alone()
            if self._has_undrawn:
                break
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
            self._has_undrawn = plan.masks is not None
        self.is_idle = not self.flight
        if self.is_idle:
            return self.scheduler.take_outputs()
        self._draw_if_alone()
        plan, ticket = self.flight.popleft()
        outputs = self.scheduler.update_from_output(plan, self.executor.collect(ticket))
        self._draw_if_alone()
        return outputs

    def _draw_if_alone(self) -> None:
        """Draw the step that waits for masks, if all before it are settled."""
        if self._has_undrawn and len(self.flight) == 1:
            plan, ticket = self.flight[0]
            self._has_undrawn = False
            assert plan.masks is not None
            if plan.masks.ahead is not None:
                plan.masks.drawn = self.executor.preview(ticket)
            self.executor.sample(ticket, self.scheduler.masks(plan))

    @property
    def has_work(self) -> bool:
        """Is there anything to compute, to settle or to send to the worker?"""
        return bool(self.flight) or self.scheduler.has_requests()
