"""Pictures in conversations: takes them out of messages, for prompts of chat templates."""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RequestError

KINDS = ("image", "image_url", "image_pil", "input_image")
DATA_URL = re.compile(r"data:[\w.+/-]*(;[\w.+=-]*)*?;base64,", re.ASCII)
LONGEST_SCHEME = 200  # characters before the content of a data URL


def taken(messages: Sequence[Any]) -> tuple[Sequence[Any], list[object]]:
    """The messages with ``{"type": "image"}`` in place of each picture, and the pictures in order.
    Raises ``RequestError`` for a part that has none."""
    found: list[object] = []
    if not isinstance(messages, list | tuple):
        return messages, found
    changed = [_message(each, found) for each in messages]
    return (changed if found else messages), found


def _message(message: Any, found: list[object]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in KINDS:
            found.append(_picture(part))
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _picture(part: Mapping[str, Any]) -> object:
    """A PIL image or the bytes of a file: the picture in a part of a message."""
    value = part.get(str(part["type"]))
    if value is None:
        value = next((part[key] for key in ("image", "url", "image_url") if key in part), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if not isinstance(value, str):
        return value
    head = DATA_URL.match(value[:LONGEST_SCHEME])
    if head is None:
        raise RequestError(
            f"a picture's URL is {value[:80]!r}, must be a data URL in base64 "
            '("data:image/png;base64,..."): load the picture, and send its content',
            param="messages",
        )
    try:
        return b64decode(value[head.end() :], validate=True)
    except (Base64Error, ValueError) as error:
        raise RequestError(
            f"a picture's data URL is not valid base64: {error}", param="messages"
        ) from error
