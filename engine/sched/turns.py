"""A scheduler does one thing at a time. A hook that begins another one within it is told so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from engine.sched.scheduler import Scheduler

S = TypeVar("S", bound="Scheduler")
P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """What the scheduler is doing. Raises ``RuntimeError`` for a second thing at once, which is
    then the fault of the hook that wanted it."""

    def __init__(self) -> None:
        self._doing = ""

    def begin(self, what: str) -> None:
        if self._doing:
            raise RuntimeError(
                f"{what}() was called within {self._doing}(); keep it in mind and call it between "
                "two steps (only wake() and watch_again() may be called at any time)"
            )
        self._doing = what

    def end(self) -> None:
        self._doing = ""


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method of a scheduler is a turn of its own."""

    @wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        turn = self.guard.faults.turn
        turn.begin(method.__name__)
        try:
            return method(self, *args, **kwargs)
        finally:
            turn.end()

    return alone
