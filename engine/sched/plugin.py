"""Checks that a policy of a few lines should not have to write."""

from __future__ import annotations

from math import isfinite

from engine.sched.policy import Refuse
from engine.sched.request import Request


def require_positive(**options: float) -> None:
    """Raise ``ValueError`` naming the first option that is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}, must be above 0")


def wrong_hints(req: Request, *names: str) -> Refuse | None:
    """For ``on_add``: these hints, where given, must be finite numbers above 0."""
    for name in names:
        value = req.hints.get(name, 1)
        if not (isinstance(value, int | float) and isfinite(value) and value > 0):
            return Refuse(f"hints[{name!r}] is {value!r}, must be a number above 0")
    return None
