"""Pictures in conversations: takes them out of messages, for prompts of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RequestError, RequestTypeError
from engine.pictures.sources import DETAILS, Given

KINDS = ("image", "image_url", "image_pil", "input_image")
PLAIN = (str, int, float, list, tuple, Mapping, type(None))
UNREAD = ("video", "audio")  # in the types of parts that no model reads here


def taken(messages: Sequence[Any]) -> tuple[Sequence[Any], list[Given]]:
    """The messages with ``{"type": "image"}`` in place of each picture, and the pictures in order.
    Raises ``RequestError`` for a part that has none, and for videos and sound, which templates may
    leave out without a word."""
    found: list[Given] = []
    if not isinstance(messages, list | tuple):
        return messages, found
    changed = [_message(each, found) for each in messages]
    return (changed if found else messages), found


def _message(message: Any, found: list[Given]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        _check_plain(content)
        return message
    parts: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in KINDS:
            found.append(picture_in(part))
            parts.append({"type": "image"})
            continue
        if isinstance(kind, str) and any(each in kind for each in UNREAD):
            raise RequestError(
                f"messages has a part of type {kind!r:.40}, must be text or a picture: this engine "
                "reads no videos and no sound",
                param="messages",
            )
        _check_plain(part)
        parts.append(part)
    return {**message, "content": parts}


def _check_plain(value: Any) -> None:
    """Raise ``RequestTypeError`` for what a template would leave out or write as Python shows it,
    such as a picture in a place of its own."""
    values = value.values() if isinstance(value, Mapping) else [value]
    for each in values:
        if not isinstance(each, PLAIN):
            raise RequestTypeError(
                f"messages has {each!r:.40} ({type(each).__name__}) in a content, must be texts; "
                'a picture is a part {"type": "image", "image": ...}',
                param="messages",
            )


def picture_in(part: Mapping[str, Any], param: str = "messages") -> Given:
    """The picture in a part of a message. Raises ``RequestError`` about the field ``param`` for
    a part without a picture, or with an unknown detail."""
    if part.get("file_id") is not None:
        raise RequestError(
            f"{param} has a picture with file_id {part['file_id']!r:.40}, and this server stores "
            "no files: send the picture as a data URL",
            param=param,
        )
    value = part.get(str(part["type"]))
    if value is None:
        value = next((part[key] for key in ("image", "url", "image_url") if key in part), None)
    detail = part.get("detail")
    if isinstance(value, Mapping):
        detail = value.get("detail", detail)
        value = value.get("url")
    if isinstance(value, Given):
        return value
    if value is None or value == "":
        raise RequestError(
            f"{param} has a part of type {part['type']!r} without a picture: add it, or its URL",
            param=param,
        )
    if detail is not None and detail not in DETAILS:
        raise RequestError(
            f"{param} has a picture with detail {detail!r:.40}, must be one of: "
            f"{', '.join(DETAILS)}",
            param=param,
        )
    return Given(value, detail or DETAILS[0])
