"""Where log lines go when the program around the engine has not said."""

from __future__ import annotations

import logging

ROOT = "engine"


def set_up_logging(level: str) -> None:
    """Set the engine's level, and write to standard error if nobody handles log records yet."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
