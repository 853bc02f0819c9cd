"""Decides how long the step loop may wait for messages."""

from __future__ import annotations

from typing import Literal

from engine.config.engine import EngineConfig

Work = Literal["none", "prefill", "decode"]
"""The next step: nothing to compute, prompt tokens, or one token for each request."""


def poll_timeout_ms(config: EngineConfig, work: Work) -> int:
    """Milliseconds to wait for messages before a step; 0 before a step that computes a prompt."""
    if work == "prefill":
        return 0
    options = config.polling
    return options.idle_wait_ms if work == "none" else options.decode_poll_timeout_ms
