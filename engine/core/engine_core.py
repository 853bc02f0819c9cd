"""EngineCore: the step loop. It schedules plans, launches them, and settles their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Protocol, TypeVar

from engine.messages.step import Column, Masks, StepPlan, StepResult
from engine.sched.interface import SchedulerInterface, StepOutputs

Ticket = TypeVar("Ticket")


class Executor(Protocol[Ticket]):
    """Computes plans in the order of their launch. A ticket stands for a launched step."""

    @property
    def capabilities(self) -> frozenset[str]:
        """The plan parts it can compute, and whether it proposes drafts (names in
        ``engine.messages.step.CAPABILITIES``)."""
        ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step: the forward pass and, unless the plan has a ``MaskPart``, sampling."""
        ...

    def preview(self, ticket: Ticket) -> Column | None:
        """The tokens of a launched step that were sampled before their masks were ready
        (``MaskPart.drawn``); ``None`` if reading them would require waiting."""
        ...

    def sample(self, ticket: Ticket, masks: Masks | None) -> None:
        """Start to sample a step whose plan has a ``MaskPart``; called before the next launch.

        ``masks``: ``None`` without masks; the rows that need one then fail.
        """
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a launched step and return its result."""
        ...

    @property
    def methods(self) -> Collection[str]:
        """Names of the methods that ``call`` accepts."""
        ...

    def call(self, name: str, *args: Any) -> Any:
        """Call a method by name, between two steps. Raises ``ConfigError`` for an unknown name."""
        ...

    def shutdown(self) -> None:
        """Release the model and its memory. May be repeated."""
        ...


class EngineCore:
    """Keeps up to ``depth`` steps in flight: 1 is synchronous, 2 plans a step during another.

        launch N+1 (forward) ─> collect N, settle N ─> [masks, sample N+1] ─> launch N+2 ...

    A step whose plan has a ``MaskPart`` is sampled when all earlier steps are settled; the next
    step is launched after that.
    """

    def __init__(
        self, scheduler: SchedulerInterface, executor: Executor[Any], depth: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.flight: deque[tuple[StepPlan, Any]] = deque()
        self.is_idle = False  # the last call of ``step`` had nothing to compute or settle
        self._has_undrawn = False  # the newest step in flight waits for masks to be sampled

    def step(self) -> StepOutputs:
        """Launch steps until ``depth`` are in flight, then settle the oldest and return its
        outputs.

        If there is nothing to compute, returns the outputs that the scheduler has anyway.
        """
        while len(self.flight) < self.depth:
            self._draw_if_alone()
            if self._has_undrawn:
                break
            plan = self.scheduler.schedule()
            if not isinstance(plan, StepPlan):  # a custom scheduler may forget to return it
                name = type(self.scheduler).__name__
                raise TypeError(
                    f"{name}.schedule() returned {plan!r:.80}, must return a StepPlan: end a "
                    "custom loop with `return self.seal(step)`"
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
        """Sample the step that waits for masks, if all earlier steps are settled."""
        if self._has_undrawn and len(self.flight) == 1:
            plan, ticket = self.flight[0]
            self._has_undrawn = False
            assert plan.masks is not None
            if plan.masks.ahead is not None:
                plan.masks.drawn = self.executor.preview(ticket)
            self.executor.sample(ticket, self.scheduler.masks(plan))

    @property
    def has_work(self) -> bool:
        """True if there is anything to compute, to settle or to send to the worker."""
        return bool(self.flight) or self.scheduler.has_requests()
