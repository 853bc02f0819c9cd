"""EngineCore: the step loop. It schedules plans, launches them and applies their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Protocol, TypeVar

from engine.messages.step import Column, Masks, StepPlan, StepResult
from engine.sched.interface import PauseState, SchedulerInterface, StepOutputs

Ticket = TypeVar("Ticket")


class Executor(Protocol[Ticket]):
    """Computes plans in the order of their launch. A ticket stands for a launched step."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Names from ``engine.messages.step.CAPABILITIES``: the plan parts and features that the
        executor supports."""
        ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step: the forward pass and, unless the plan has a ``MaskPart``, sampling."""
        ...

    def preview(self, ticket: Ticket) -> Column | None:
        """Return the tokens that a launched step sampled before its masks were ready, for
        ``MaskPart.drawn``; ``None`` if there are none yet."""
        ...

    def sample(self, ticket: Ticket, masks: Masks | None) -> None:
        """Start sampling a step whose plan has a ``MaskPart``. Called before the next launch.

        ``masks``: the allowed tokens of each row; with ``None``, rows that need a mask fail."""
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
    """The engine's step loop. With ``depth`` 2, a step is planned while the previous one runs.

        launch N+1 (forward) ─> collect N, settle N ─> [masks, sample N+1] ─> launch N+2 ...

    To settle a step is to apply its results to the scheduler. A step with grammar masks is sampled
    after all earlier steps are settled, and before the next step is launched."""

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
        """Launch steps until ``depth`` are in flight, then wait for the oldest and return its
        outputs.

        Without anything to compute, it returns outputs that need no step, such as those of
        aborts."""
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

    def finish_steps(self) -> None:
        """Collect the steps in flight, and let the worker do what needs no step, such as storing
        KV blocks. No request is scheduled any more."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.step()
        while not self.is_idle:
            self.step()

    def _draw_if_alone(self) -> None:
        """Start sampling the newest step if it waits for masks and all earlier steps are
        finished."""
        if self._has_undrawn and len(self.flight) == 1:
            plan, ticket = self.flight[0]
            self._has_undrawn = False
            assert plan.masks is not None
            if plan.masks.ahead is not None:
                plan.masks.drawn = self.executor.preview(ticket)
            self.executor.sample(ticket, self.scheduler.masks(plan))

    @property
    def has_work(self) -> bool:
        """True if there is anything to compute, to collect from the worker or to send to it."""
        return bool(self.flight) or self.scheduler.has_requests()
