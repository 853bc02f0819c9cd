"""Pictures in the messages of all APIs.

A content with pictures is a list of OpenAI's parts: texts and ``image_url``. While a conversation
is adapted to its chat template, contents are texts in which each picture is one character, its
mark: half of a surrogate pair, which the text of a request cannot have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from engine.pictures.chat import KINDS as PICTURE_PARTS
from engine.pictures.chat import picture_in
from engine.pictures.sources import Given
from engine.server.errors import field_error

Message = dict[str, Any]
Part = dict[str, Any]
SHOWING = ("user", "tool")  # roles of messages with pictures
FIRST = 0xDC00
MOST_PICTURES = 1024  # of a conversation, as many as there are marks
MARK = re.compile("[\udc00-\udfff]")
assert chr(FIRST + MOST_PICTURES - 1) == "\udfff"


def is_picture(part: object) -> bool:
    """Whether a part of a message is a picture."""
    return isinstance(part, dict) and part.get("type") in PICTURE_PARTS


def picture_part(part: Part, param: str) -> Part:
    """A picture of any of OpenAI's APIs as a part of a chat completion. Raises ``RequestError`` or
    ``ApiError`` about the field ``param``."""
    given = picture_in(part, param)
    if not isinstance(given.value, str):
        raise field_error(param, f"has a picture {given.value!r:.40}, must be a URL")
    return {"type": "image_url", "image_url": {"url": given.value, "detail": given.detail}}


def joined_parts(parts: Iterable[str | Part], between: str = "") -> str | list[Part]:
    """Join consecutive texts by ``between``. Returns one text if there are no pictures."""
    found: list[Part] = []
    for part in parts:
        if not isinstance(part, str):
            found.append(part)
        elif found and found[-1]["type"] == "text":
            found[-1]["text"] += between + part
        else:
            found.append({"type": "text", "text": part})
    if any(each["type"] != "text" for each in found):
        return found
    return str(found[0]["text"]) if found else ""


def marked(content: str | Sequence[Part], pictures: list[Given], param: str) -> str:
    """A content as one text, with the marks of its pictures, which are added to ``pictures``."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        if part["type"] == "text":
            texts.append(part["text"])
            continue
        if len(pictures) == MOST_PICTURES:
            raise field_error(
                param, f"has more than {MOST_PICTURES} pictures, the limit: send fewer"
            )
        texts.append(chr(FIRST + len(pictures)))
        pictures.append(picture_in(part, param))
    return "".join(texts)


def has_marks(message: Message) -> bool:
    """Whether a message has pictures."""
    content = message.get("content")
    # Other roles have none, but a call's arguments may have any characters.
    return message["role"] in SHOWING and isinstance(content, str) and bool(MARK.search(content))


def with_parts(
    messages: Sequence[Message], pictures: Sequence[Given] = (), *, all_texts: bool = False
) -> list[Message]:
    """Put parts in place of the contents that have marks, or of all with ``all_texts``. pictures:
    put into the parts, if any are given."""

    def parts_of(text: str) -> list[Part]:
        parts: list[Part] = []
        end = 0
        for match in MARK.finditer(text):
            if match.start() > end:
                parts.append({"type": "text", "text": text[end : match.start()]})
            number = ord(match[0]) - FIRST
            parts.append({"type": "image", "image": pictures[number]} if pictures else IMAGE)
            end = match.end()
        if end < len(text) or not parts:
            parts.append({"type": "text", "text": text[end:]})
        return parts

    return [
        {**message, "content": parts_of(message["content"])}
        if has_marks(message) or (all_texts and isinstance(message.get("content"), str))
        else message
        for message in messages
    ]


IMAGE: Part = {"type": "image"}


def with_pictures_after_results(messages: list[Message]) -> list[Message]:
    """Move the pictures of tool results to the user message after them, for templates that show
    none in results."""
    found: list[Message] = []
    marks = ""
    for message in messages:
        if message["role"] == "tool" and has_marks(message):
            content = message["content"]
            marks += "".join(MARK.findall(content))
            message = {**message, "content": MARK.sub("", content) or "(a picture, see below)"}
        elif marks and message["role"] != "tool":
            if message["role"] == "user":
                message = {**message, "content": f"{marks}\n{message['content']}"}
            else:
                found.append({"role": "user", "content": marks})
            marks = ""
        found.append(message)
    if marks:
        found.append({"role": "user", "content": marks})
    return found
