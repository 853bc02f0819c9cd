"""Fields as the client has named them: each API calls some of them otherwise than the engine."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine.server.errors import ApiError

KEY = "metronome.asked"  # the request as it was read, in the scope


def in_words_of(asked: msgspec.Struct | None, error: ApiError) -> ApiError:
    """The same error about the field that the client has sent.

    ``called`` of the request's class has, for the engine's name of a field, the names that this API
    has for it: of several the one that was given, or the first. A field that this API does not have
    is not blamed. ``asked`` is ``None`` for what has no such class.
    """
    if asked is None:
        return error
    if error.param is not None:
        name = _called(asked, error.param)
        error.message = _reworded(error.message, error.param, name, asked)
        error.param = name
    return error


def _called(asked: msgspec.Struct, name: str) -> str | None:
    names: tuple[str, ...] | None = getattr(asked, "called", {}).get(name)
    if names is not None:
        return next((each for each in names if _given(asked, each)), names[0])
    return name if hasattr(asked, re.split(r"[.\[]", name)[0]) else None


def _given(asked: msgspec.Struct, name: str) -> bool:
    return getattr(asked, name.partition(".")[0]) is not None


def _reworded(message: str, before: str, now: str | None, asked: msgspec.Struct) -> str:
    """With this API's names of fields, where a word can be nothing but a field's name."""
    if now is not None:
        message = re.sub(rf"\A{re.escape(before)}(?= )", now, message)
    called: dict[str, Any] = getattr(asked, "called", {})
    for name in called:
        if "_" in name:
            message = re.sub(rf"(?<![\w.]){name}(?!\w)", _called(asked, name) or name, message)
    return message
