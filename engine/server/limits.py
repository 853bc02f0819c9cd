"""Limits on the fields of one request, checked before any work is done for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.server.errors import field_error

MAX_DEPTH = 64  # levels of nested lists and objects
MAX_ENTRIES = {
    "messages": 8192,
    "tools": 512,
    "stop": 64,
    "bad_words": 1024,
    "stop_token_ids": 4096,
    "allowed_token_ids": 1 << 18,
    "logit_bias": 4096,
    "chat_template_kwargs": 64,
    "hints": 64,
    "kv_transfer_params": 16,
    "documents": 2048,
}
MAX_CHARS = {"stop": 1024, "bad_words": 1024, "user": 1024, "cache_salt": 1024}
"""Most characters of a text, or of each text in a list."""
RANGES = {"repetition_penalty": (1e-6, 1e6)}
"""Least and greatest values of fields; outside of them logits would not be finite."""
COUNTED_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
FLAT = ("prompt",)  # decoded into a type that cannot be nested
SENT_TO_CORE = ("hints", "kv_transfer_params")  # as msgpack, which has integers of 64 bits
INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class ServerLimits:
    """Limits on requests that an operator can change by options of the server."""

    max_body_bytes: int = 32 << 20
    max_n: int = 128
    """Most sequences per prompt."""
    max_logprobs: int = 20
    """Most tokens whose log-probabilities are returned at each position; -1: no limit."""
    max_requests_per_key: int | None = None
    """Most open requests of one key."""
    refuse_server_tools: bool = False
    """Refuse tools that the server would have to run; otherwise they are left out."""

    def __post_init__(self) -> None:
        least = {"max_body_bytes": 1, "max_n": 1, "max_logprobs": -1, "max_requests_per_key": 1}
        check_at_least(self, least)


def check_at_least(options: object, least: dict[str, int]) -> None:
    """Raise ``ConfigError`` if an option is below its minimum, given in ``least`` by name."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{name} is {value}, must be at least {low}")


def check_limits(body: msgspec.Struct, limits: ServerLimits) -> None:
    """Raise ``ApiError`` for the first field of a request that exceeds a limit."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, int):
            _check_number(name, value, limits)
        elif isinstance(value, float):
            _check_real(name, value)
        elif isinstance(value, str):
            _check_chars(name, (value,))
        elif isinstance(value, list | dict) and name not in getattr(body, "flat", ()):
            _check_entries(name, value)


def _check_number(name: str, value: int, limits: ServerLimits) -> None:
    _check_whole(name, value)
    if name == "n" and value > limits.max_n:
        raise field_error(
            name,
            f"is {value}, the limit is {limits.max_n}: request fewer sequences, or raise --max-n "
            "of the server",
        )
    most = limits.max_logprobs
    if name in COUNTED_LOGPROBS and most >= 0 and not 0 <= value <= most:
        raise field_error(
            name,
            f"is {value}, must be 0 to {most}: request fewer, or raise --max-logprobs of "
            "the server",
        )


def _check_whole(name: str, value: int) -> None:
    if value not in INT64:
        raise field_error(name, f"has {_shown(value)}, must be a signed integer of 64 bits")


def _check_real(name: str, value: float) -> None:
    low, high = RANGES.get(name, (value, value))
    if not low <= value <= high:
        raise field_error(name, f"is {value}, must be in [{low:g}, {high:g}]")


def _check_chars(name: str, texts: Iterable[str]) -> None:
    most = MAX_CHARS.get(name)
    if most is None:
        return
    for text in texts:
        if len(text) > most:
            raise field_error(
                name, f"has a text of {len(text)} characters, the limit is {most}: shorten it"
            )


def _check_entries(name: str, value: list[Any] | dict[str, Any]) -> None:
    most = MAX_ENTRIES.get(name)
    if most is not None and len(value) > most:
        raise field_error(name, f"has {len(value)} entries, the limit is {most}: send fewer")
    if name in MAX_CHARS:
        _check_chars(name, value)
    if name not in FLAT:
        _check_depth(name, value)


def _check_depth(name: str, whole: list[Any] | dict[str, Any]) -> None:
    level: list[Any] = [whole]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise field_error(
                name, f"has more than {MAX_DEPTH} nested levels, the limit: use fewer"
            )
        inner = [
            value
            for outer in level
            for value in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if name in SENT_TO_CORE:
            for value in inner:
                if isinstance(value, int):
                    _check_whole(name, value)
        level = [value for value in inner if isinstance(value, list | dict)]


def _shown(value: int) -> str:
    return str(value) if -(10**40) < value < 10**40 else "a number of over 40 digits"
