"""How long a core that has work, or none, waits for messages."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.check import check_range, check_types
from engine.config.env import DECODE_POLL_TIMEOUT, decode_poll_timeout
from engine.errors import ConfigError

MAX_POLL_MS = 2**31 - 1  # what a poll takes
MAX_DIGITS = 20  # far more of them Python does not even convert


@dataclass(frozen=True, kw_only=True)
class PollOptions:
    """How long a core in a process of its own waits for messages."""

    decode_poll_timeout_ms: int | None = None
    """Milliseconds a core in a process of its own looks for messages between decode steps; if not
    given METRONOME_DECODE_POLL_TIMEOUT_MS, or 0, which does not wait."""
    idle_wait_ms: int = 1000
    """Longest sleep of such a core without work, in milliseconds; whatever arrives ends it."""


@dataclass(frozen=True, kw_only=True)
class PollConfig(PollOptions):
    """Waits of the step loop for what comes in, in milliseconds."""

    decode_poll_timeout_ms: int = 0
    """Longest first look for messages while sequences decode; 0 does not wait."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 0, MAX_POLL_MS, "decode_poll_timeout_ms")
        check_range(self, 1, MAX_POLL_MS, "idle_wait_ms")


def asked_decode_poll_timeout_ms(option: int | None) -> int:
    """The option, or else what the environment says, or else 0.

    Raises ``ConfigError`` for a variable that is no number of milliseconds.
    """
    if option is not None:
        return option
    value = decode_poll_timeout()
    if value is None:
        return 0
    is_number = value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS
    if not is_number or int(value) > MAX_POLL_MS:
        raise ConfigError(
            f"{DECODE_POLL_TIMEOUT} is {value!r:.80}, must be a whole number in 0..{MAX_POLL_MS}, "
            "in milliseconds (0: do not wait)"
        )
    return int(value)
