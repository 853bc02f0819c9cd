"""Faults of plug-ins: who, in which hook, about which request; and the time their hooks take."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

from engine.sched.request import Request
from engine.sched.turns import Turn

logger = logging.getLogger("engine.sched")


class FaultLog:
    """Faults of plug-ins and the time spent in their hooks."""

    def __init__(self, max_faults: int, timer: Callable[[], float]) -> None:
        self.max_faults = max_faults
        self.timer = timer
        self.messages: list[str] = []  # the first hundred
        self.num_faults = 0
        self.turn = Turn()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by hook

    def note(self, culprit: str, request: Request | None, what: str) -> None:
        """Keep and log one fault."""
        about = f", request {request.request_id}" if request is not None else ""
        self.num_faults += 1
        if len(self.messages) < 100:
            self.messages.append(f"{culprit}{about}: {what}")
            logger.warning("%s; answered by default", self.messages[-1])
