"""Replace the engine's field names in errors by the names that the client's API uses."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine.server.errors import ApiError

KEY = "metronome.body"  # the decoded body of the request, in the scope


def with_client_names(body: msgspec.Struct | None, error: ApiError) -> ApiError:
    """Change an error so that it names the field that the client has sent.

    ``client_names`` of the body's class maps the engine's name of a field to the API's names. Among
    several, the one that the client has set is used, or else the first. ``param`` becomes ``None``
    for a field that the API does not have. Without a ``body`` the error is not changed.
    """
    if body is None:
        return error
    if error.param is not None:
        name = _client_name(body, error.param)
        error.message = _reworded(error.message, error.param, name, body)
        error.param = name
    return error


def _client_name(body: msgspec.Struct, name: str) -> str | None:
    names: tuple[str, ...] | None = getattr(body, "client_names", {}).get(name)
    if names is not None:
        return next((each for each in names if _given(body, each)), names[0])
    return name if hasattr(body, re.split(r"[.\[]", name)[0]) else None


def _given(body: msgspec.Struct, name: str) -> bool:
    return getattr(body, name.partition(".")[0]) is not None


def _reworded(message: str, before: str, now: str | None, body: msgspec.Struct) -> str:
    """Replace the engine's field names in a message by the client's. The first word, if it is
    ``before``, becomes ``now``, if given. Elsewhere only names with an underscore are replaced,
    since others could be ordinary words."""
    if now is not None:
        message = re.sub(rf"\A{re.escape(before)}(?= )", now, message)
    client_names: dict[str, Any] = getattr(body, "client_names", {})
    for name in client_names:
        if "_" in name:
            known = _client_name(body, name) or name
            message = re.sub(rf"(?<![\w.]){name}(?!\w)", known, message)
    return message
