"""Faults of plug-ins, the time spent in their hooks, and calls out of turn.

FaultLog       faults of all plug-ins, and the time spent in their hooks
ReentryGuard   a hook that calls the scheduler gets an error (``not_reentrant``)
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from engine.sched.request import Request

logger = logging.getLogger("engine.sched")
SLOW_SECONDS = 1.0  # of planning one step, from which on the log names the hook that took them


class FaultLog:
    """Faults of plug-ins and the time spent in their hooks."""

    def __init__(self, max_faults: int, timer: Callable[[], float]) -> None:
        self.max_faults = max_faults
        self.timer = timer
        self.messages: list[str] = []  # the first hundred
        self.num_faults = 0
        self.reentry = ReentryGuard()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by hook
        self._begun = 0.0
        self._seconds_before: dict[str, float] = {}  # when the step began
        self._slowest = SLOW_SECONDS

    def begin_step(self) -> None:
        """A step is planned from now on."""
        self.reentry.begin("schedule")
        self._begun, self._seconds_before = self.timer(), dict(self.seconds)

    def end_step(self) -> None:
        """The plan is made. A slow hook, which delays every request, is logged once, and again
        when it has become twice as slow: it cannot be interrupted."""
        self.reentry.end()
        if self.timer() - self._begun < self._slowest:
            return
        before = self._seconds_before
        spent = {hook: now - before.get(hook, 0.0) for hook, now in self.seconds.items()}
        hook = max(spent, key=spent.__getitem__, default="")
        if hook and spent[hook] >= self._slowest:
            self._slowest = 2 * spent[hook]
            logger.warning("%s took %.1f s in one step; all requests waited", hook, spent[hook])

    def note(self, culprit: str, request: Request | None, what: str) -> None:
        """Keep and log one fault."""
        about = f", request {request.request_id}" if request is not None else ""
        self.num_faults += 1
        if len(self.messages) < 100:
            self.messages.append(f"{culprit}{about}: {what}")
            logger.warning("%s; answered by default", self.messages[-1])


class ReentryGuard:
    """Knows which method of the scheduler is running. A second one within it raises
    ``RuntimeError``, which counts as a fault of the hook that called it."""

    def __init__(self) -> None:
        self._doing = ""

    def begin(self, what: str) -> None:
        if self._doing:
            raise RuntimeError(
                f"{what}() was called within {self._doing}(); call it between two steps "
                "instead (only wake() and watch_again() may be called at any time)"
            )
        self._doing = what

    def end(self) -> None:
        self._doing = ""


class GuardsReentry(Protocol):
    """Does one thing at a time: see ``not_reentrant``."""

    @property
    def reentry(self) -> ReentryGuard: ...


S = TypeVar("S", bound=GuardsReentry)
P = ParamSpec("P")
R = TypeVar("R")


def not_reentrant(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method of a scheduler that a hook may not call from within another one."""

    @wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        guard = self.reentry
        guard.begin(method.__name__)
        try:
            return method(self, *args, **kwargs)
        finally:
            guard.end()

    return alone
