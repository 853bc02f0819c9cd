"""How long the step loop may wait for messages, given what there is to do."""

from __future__ import annotations

from typing import Literal

from engine.config.engine import EngineConfig

Work = Literal["none", "prefill", "decode"]
"""What the next step would do: nothing, some prompt's tokens, or one token each for all."""


def poll_timeout_ms(config: EngineConfig, work: Work, is_first: bool) -> int:
    """Milliseconds of a poll; ``is_first`` of those that drain the inbox before a step.

    The same for every transport. What follows a first message is there already or belongs to the
    next step, and a prompt never waits.
    """
    if not is_first or work == "prefill":
        return 0
    asked = config.polling
    return asked.idle_wait_ms if work == "none" else asked.decode_poll_timeout_ms
