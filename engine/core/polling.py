"""Decides how long the step loop may wait for messages."""

from __future__ import annotations

from typing import Literal

from engine.config.engine import EngineConfig

PARKED_SECONDS = (0.001, 0.02)  # least and most time between two steps while all are parked
PARKED_SHARE = 0.05  # that time as a share of the time they have been parked

Work = Literal["none", "prefill", "decode"]
"""The next step: nothing to compute, prompt tokens, or one token for each request."""


def parked_seconds(waited: float) -> float:
    """Seconds until the next step if all requests have been parked for ``waited`` seconds."""
    shortest, longest = PARKED_SECONDS
    return min(max(shortest, PARKED_SHARE * waited), longest)


def poll_timeout_ms(config: EngineConfig, work: Work) -> int:
    """Milliseconds to wait for messages before a step; 0 before a step that computes a prompt."""
    if work == "prefill":
        return 0
    options = config.polling
    return options.idle_wait_ms if work == "none" else options.decode_poll_timeout_ms
