"""How long the step loop may wait for messages, given what there is to do."""

from __future__ import annotations

from typing import Literal

from engine.config.engine import EngineConfig

Work = Literal["none", "prefill", "decode"]
"""What the next step would do: nothing, some prompt's tokens, or one token each for all."""


def poll_timeout_ms(config: EngineConfig, work: Work) -> int:
    """Milliseconds to wait for the first message before a step; a prompt never waits."""
    if work == "prefill":
        return 0
    options = config.polling
    return options.idle_wait_ms if work == "none" else options.decode_poll_timeout_ms
