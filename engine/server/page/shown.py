"""How the page shows causes and numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.server.answers import OURS
from engine.server.page.owners import Viewer

BY = "preempted by "
PREEMPTED = "preempted"
CORE_ID = re.compile(r"(?:clients?-[0-9a-f]+/)?\d+/(?:[a-z]+-)?(.*)", re.DOTALL)


def rounded(seconds: float) -> float:
    return round(seconds, 4)


def shown_cause(cause: str, viewer: Viewer) -> str:
    """A cause of waiting. An API key does not see which request preempted its own: that may be
    another key's."""
    if not cause.startswith(BY):
        return cause
    return PREEMPTED if viewer is not None else BY + plain_id(cause.removeprefix(BY))


def shown_waits(waits: Mapping[str, float], viewer: Viewer) -> dict[str, float]:
    """Seconds by cause."""
    shown: dict[str, float] = {}
    for cause, seconds in waits.items():
        name = shown_cause(cause, viewer)
        shown[name] = shown.get(name, 0.0) + seconds
    return {name: rounded(seconds) for name, seconds in shown.items()}


def plain_id(core_id: str) -> str:
    """The id of the HTTP request in an id of the core, such as ``17/chatcmpl-ID~1f2e3d4c5b6a``. Ids
    of other programs stay as they are."""
    found = CORE_ID.fullmatch(core_id)
    return core_id if found is None else found[1].partition(OURS)[0]
