"""Where log lines go when the program around the engine has not configured logging."""

from __future__ import annotations

import logging
import time

ROOT = "engine"
THROTTLE_SECONDS = 1.0


def set_up_logging(level: str) -> None:
    """Set the engine's level, and write to standard error if there is no log handler yet."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)


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
