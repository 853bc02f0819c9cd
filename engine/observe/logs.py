"""Default logging to standard error, if the surrounding program has not configured logging."""

from __future__ import annotations

import logging
import time
from typing import TextIO

from engine.observe.guard import Failures

ROOT = "engine"
THROTTLE_SECONDS = 1.0
LOST = Failures()
"""Counts log lines of this process that could not be written to standard error."""


def set_up_logging(level: str, who: str = "") -> None:
    """Set the engine's log level, and log to standard error if there is no log handler yet. who:
    put before each message, such as ``core 1``."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    if logger.hasHandlers():
        return
    handler = LossyHandler()
    handler.setFormatter(
        logging.Formatter(
            f"%(levelname)s %(asctime)s %(name)s: {who and f'{who}: '}%(message)s", "%H:%M:%S"
        )
    )
    logger.addHandler(handler)


class LossyHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error. Lines that cannot be written (full disk, closed file) are counted
    and dropped, because an error here would fail the code that logs."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it as lost."""
        before = self._num_lost
        super().emit(record)
        if self._num_lost != before:
            LOST.add("log")

    @property
    def _num_lost(self) -> int:
        """Number of failed writes that the stream has counted instead of raising errors."""
        return getattr(getattr(self.stream, "buffer", None), "num_lost", 0)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a failed line. Python's default would write to standard error, which may raise
        again."""
        LOST.add("log")


class Throttle:
    """Limits a log message to one line per second and counts the others, so that no disk fills."""

    def __init__(self) -> None:
        self._next_at = -1.0
        self._num_held_back = 0

    def admit(self, now: float | None = None) -> str | None:
        """Return the text to append to a log line ("" or the number of suppressed lines); ``None``
        if the line must be suppressed."""
        now = time.monotonic() if now is None else now
        if now < self._next_at:
            self._num_held_back += 1
            return None
        held_back, self._num_held_back = self._num_held_back, 0
        self._next_at = now + THROTTLE_SECONDS
        return f" ({held_back} more before it)" if held_back else ""
