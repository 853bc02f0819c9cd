"""Rules of the house that are counted and shown at the end of a run, and fail nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

SHOWN = 5


class HouseRule(UserWarning):
    """What a rule does not allow, and where the first few places are."""


def count(rule: str, found: Sequence[str]) -> None:
    """Warn of places where a rule is not kept, whatever the filters of warnings are."""
    if not found:
        return
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        text = f"{rule}: {len(found)}\n" + "\n".join([*sorted(found)[:SHOWN], *more])
        warnings.warn(text, HouseRule, stacklevel=2)
