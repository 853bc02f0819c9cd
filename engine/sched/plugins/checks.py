"""Checks of options and hints that several policies use."""

from __future__ import annotations

from engine.messages.params import is_finite
from engine.sched.policy import Refuse, SchedView
from engine.sched.request import Request


def require_positive(*or_zero: str, **options: float) -> None:
    """Raise ``ValueError`` for the first option that is not a finite number above 0.

    Options named in ``or_zero`` may be 0.
    """
    for name, value in options.items():
        if not (is_finite(value) and (value > 0 or (value == 0 and name in or_zero))):
            limits = "of at least 0" if name in or_zero else "above 0"
            raise ValueError(f"{name} is {value!r:.80}, must be a finite number {limits}")


def require_share(**options: float) -> None:
    """Raise ``ValueError`` for the first option that is not a number from 0 to 1."""
    for name, value in options.items():
        if not (is_finite(value) and 0 <= value <= 1):
            raise ValueError(f"{name} is {value!r:.80}, must be a number from 0 to 1")


def wrong_hints(req: Request, *names: str) -> Refuse | None:
    """Return ``Refuse`` if one of the named hints is given but is not a finite number above 0."""
    for name in names:
        value = req.hints.get(name, 1)
        if not (is_finite(value) and value > 0):
            return Refuse(f"hints[{name!r}] is {value!r:.80}, must be a finite number above 0")
    return None


def keep_hints(req: Request, view: SchedView, **defaults: float) -> Refuse | None:
    """In ``on_add``, store each named hint of the request, or its default, in ``view.own(name)``.
    If the hint ``tbt`` is missing, ``req.tbt`` replaces the default. Returns ``Refuse`` for a hint
    that is not a finite number above 0."""
    if (wrong := wrong_hints(req, *defaults)) is None:
        for name, default in defaults.items():
            stated = req.tbt if name == "tbt" else None
            view.own(name)[req] = req.hints.get(name, default if stated is None else stated)
    return wrong
