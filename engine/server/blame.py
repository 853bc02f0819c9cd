"""Fields as the client has named them: each API calls some of them otherwise than the engine."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine.server.errors import ApiError

KEY = "metronome.body"  # the request as it was read, in the scope


def in_words_of(body: msgspec.Struct | None, error: ApiError) -> ApiError:
    """This error, naming the field that the client has sent.

    ``called`` of the request's class has, for the engine's name of a field, the names that this API
    has for it: of several the one that was given, or the first. A field that this API does not have
    is not blamed. ``body`` is ``None`` for what has no such class.
    """
    if body is None:
        return error
    if error.param is not None:
        name = _called(body, error.param)
        error.message = _reworded(error.message, error.param, name, body)
        error.param = name
    return error


def _called(body: msgspec.Struct, name: str) -> str | None:
    names: tuple[str, ...] | None = getattr(body, "called", {}).get(name)
    if names is not None:
        return next((each for each in names if _given(body, each)), names[0])
    return name if hasattr(body, re.split(r"[.\[]", name)[0]) else None


def _given(body: msgspec.Struct, name: str) -> bool:
    return getattr(body, name.partition(".")[0]) is not None


def _reworded(message: str, before: str, now: str | None, body: msgspec.Struct) -> str:
    """With this API's names of fields, where a word can be nothing but a field's name."""
    if now is not None:
        message = re.sub(rf"\A{re.escape(before)}(?= )", now, message)
    called: dict[str, Any] = getattr(body, "called", {})
    for name in called:
        if "_" in name:
            message = re.sub(rf"(?<![\w.]){name}(?!\w)", _called(body, name) or name, message)
    return message
