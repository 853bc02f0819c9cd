"""Where log lines go when the program around the engine has not configured logging."""

from __future__ import annotations

import logging
import time
from typing import TextIO

from engine.observe.guard import Failures

ROOT = "engine"
THROTTLE_SECONDS = 1.0
LOST = Failures()
"""Lines of this process that standard error did not take."""


def set_up_logging(level: str) -> None:
    """Set the engine's level, and write to standard error if there is no log handler yet."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    if logger.hasHandlers():
        return
    handler = LossyHandler()
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)


class LossyHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error. What that cannot take (a full disk, a closed file) is lost: an
    error of the log would be an error of what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count that it was lost."""
        before = self._num_lost
        super().emit(record)
        if self._num_lost != before:
            LOST.add("log")

    @property
    def _num_lost(self) -> int:
        """Where standard error is one that raises nothing, but counts itself."""
        return getattr(getattr(self.stream, "buffer", None), "num_lost", 0)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count it. Python's own would report it on standard error, which may raise once more."""
        LOST.add("log")


class Throttle:
    """Lets one log line a second through and counts the others, so that a flood fills no disk."""

    def __init__(self) -> None:
        self._next_at = -1.0
        self._num_held_back = 0

    def admit(self, now: float | None = None) -> str | None:
        """The text to append to the line, with the number held back; ``None``: hold it back."""
        now = time.monotonic() if now is None else now
        if now < self._next_at:
            self._num_held_back += 1
            return None
        held_back, self._num_held_back = self._num_held_back, 0
        self._next_at = now + THROTTLE_SECONDS
        return f" ({held_back} more before it)" if held_back else ""
