"""The only reader of the environment. Every variable is named here, with its meaning."""

from __future__ import annotations

import os

LOG_LEVEL = "METRONOME_LOG_LEVEL"
"""Log level of engines that were not given one."""


def default_log_level(fallback: str = "info") -> str:
    """What ``METRONOME_LOG_LEVEL`` says, ``fallback`` if it is not set."""
    return os.environ.get(LOG_LEVEL, fallback).lower()
