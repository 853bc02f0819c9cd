"""Convert the messages of all APIs into one plain form.

A message has a role and one text, in which pictures are marks (see ``picture_parts``). An assistant
message may also have tool calls, with arguments as objects, and thinking. Consecutive messages of
one role are joined, metadata of clients is dropped, and unknown roles are refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from engine.config.near import near_value
from engine.pictures.sources import Given
from engine.server.errors import field_error
from engine.server.picture_parts import Part, is_picture, joined_parts, marked, picture_part
from engine.text.chat import REASONING_NAMES

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SYSTEM_ROLES = ("system", "developer")  # templates know the first, newer clients send the second
TURNS = ("user", "assistant")
TEXT_PARTS = (
    "text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal",
)  # fmt: skip
METADATA = re.compile(r"(?:\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z))+\n*", re.IGNORECASE)
"""Billing lines at the beginning of a system text. They differ in every request, so that no prompt
would find its prefix in the cache."""


def plain_messages(
    given: Iterable[Message], pictures: list[Given], param: str = "messages"
) -> list[Message]:
    """Convert a conversation to plain form, and add its pictures to ``pictures``. Raises
    ``ApiError`` or ``RequestError`` for a malformed message."""
    messages: list[Message] = []
    for each in given:
        message = plain_message(each, param)
        if message is not None:
            message["content"] = marked(message["content"], pictures, param)
            messages.append(message)
    _name_old_calls(messages)
    return joined_turns(messages)


def plain_message(message: Message, param: str = "messages") -> Message | None:
    """Convert one message to plain form, with a list of parts as content if it has pictures;
    ``None`` if it has only metadata. Raises ``ApiError`` or ``RequestError``."""
    role = known_role(message.get("role"), ROLES, param)
    plain = {key: value for key, value in message.items() if value is not None}
    if "tool_call_id" in plain:
        plain["tool_call_id"] = str(plain["tool_call_id"])
    content = message.get("content")
    if role in SYSTEM_ROLES:
        plain["content"] = system_text(content, param)
        plain["role"] = "system"
        return plain if plain["content"] or not plain_content(content, param) else None
    may_show = role != "assistant"
    plain["content"] = (
        content_of(content, param) if may_show else plain_content(content, param)
    ) or _refusal_of(message)
    if role == "function":
        plain["role"] = "tool"
    if role == "assistant":
        _add_calls(plain, param)
    return plain


def known_role(role: Any, known: Sequence[str], param: str) -> str:
    """Return the role if it is in ``known``; else raise ``ApiError`` about the field ``param``."""
    if not isinstance(role, str) or role not in known:
        raise field_error(param, f"has a role {role!r:.40}, must be one of: {', '.join(known)}"
            f"{near_value(role, known)}")  # fmt: skip
    return role


def system_text(content: Any, param: str = "messages", between: str = "") -> str:
    """The text of a system message: its parts, without client metadata, joined by ``between``."""
    if not isinstance(content, list):
        return without_metadata(plain_content(content, param))
    texts = [plain_content([part], param) for part in content]
    return between.join(kept for text in texts if (kept := without_metadata(text)) or not text)


def without_metadata(text: str) -> str:
    found = METADATA.match(text)
    return text if found is None else text[found.end() :]


def content_of(content: Any, param: str = "messages") -> str | list[Part]:
    """The content of a message that may have pictures: a text, or parts. Raises ``ApiError`` or
    ``RequestError`` about field ``param``."""
    if not isinstance(content, list) or not any(map(is_picture, content)):
        return plain_content(content, param)
    return joined_parts(
        picture_part(part, param) if is_picture(part) else plain_content([part], param)
        for part in content
    )


def plain_content(content: Any, param: str = "messages") -> str:
    """The text of a message's content (text or parts). Raises ``ApiError`` about field
    ``param``."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise field_error(
            param, f"has a content {content!r:.80}, must be a text or a list of text parts"
        )
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
            kind = part.get("type") if isinstance(part, dict) else part
            way_out = "send parts of type text, or image_url for a picture"
            if is_picture(part):
                way_out = "send pictures in messages of users, and in results of tools"
            raise field_error(
                param, f"has a part of type {kind!r:.40}, which is not supported: {way_out}"
            )
    return "".join(
        text_of(part, "refusal" if part["type"] == "refusal" else "text", param) for part in content
    )


def text_of(part: dict[str, Any], name: str, param: str) -> str:
    """The text field ``name`` of a content part. Raises ``ApiError`` about the field ``param``."""
    text = part.get(name)
    if not isinstance(text, str):
        raise field_error(param, f"has a part whose {name} is {text!r:.40}, must be a text")
    return text


def joined_turns(messages: Iterable[Message], *, ignore_names: bool = False) -> list[Message]:
    """Join consecutive user messages, and consecutive assistant messages. Users with different
    names are joined only with ``ignore_names``."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        is_same = (
            last is not None
            and message["role"] == last["role"]
            and message["role"] in TURNS
            and (ignore_names or message.get("name") == last.get("name"))
        )
        if last is not None and is_same:
            turns[-1] = _joined(last, message)
        else:
            turns.append(message)
    return turns


def _joined(first: Message, second: Message) -> Message:
    """Join the texts, tool calls and thinking of two messages of one role."""
    whole = {**first, **second, "content": with_text(first, second["content"])["content"]}
    calls = [*first.get("tool_calls", []), *second.get("tool_calls", [])]
    if calls:
        whole["tool_calls"] = calls
    thoughts = [thought for each in (first, second) if (thought := thought_of(each))]
    if thoughts:
        whole = {key: value for key, value in whole.items() if key not in REASONING_NAMES}
        whole["reasoning_content"] = "\n".join(thoughts)
    return whole


def with_text(message: Message, text: str, between: str = "\n") -> Message:
    """The message with a text added to its end."""
    return {**message, "content": between.join(filter(None, [message["content"], text]))}


def thought_of(message: Message) -> str:
    """The thinking of an assistant message; empty if it has none."""
    found = next((message[name] for name in REASONING_NAMES if message.get(name)), "")
    return found if isinstance(found, str) else ""


def think(message: Message, text: str) -> None:
    """Append a text to the message's thinking."""
    before = message.get("reasoning_content")
    message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def last_answer(messages: list[Message]) -> Message:
    """Return the last message if it is the assistant's; otherwise append an empty one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _refusal_of(message: Message) -> str:
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) else ""


def _add_calls(message: Message, param: str) -> None:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise field_error(param, f"has tool_calls {calls!r:.80}, must be a list of calls")
    old = message.pop("function_call", None)  # OpenAI's older form, without ids
    if old is not None:
        calls = [*calls, {"type": "function", "function": old}]
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_plain_call(call, param) for call in calls]


def _plain_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(call, dict) and call.get("type") == "custom":
        custom = call.get("custom")
        if isinstance(custom, dict):
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
            call = {"id": call.get("id"), "type": "function"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise field_error(
            param, f"has a tool call {call!r:.80}, must have a function with name and arguments"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a model may write invalid JSON
            arguments = json.loads(arguments)
    plain = {**call, "function": {**function, "arguments": arguments}}
    if call.get("id") is not None:
        plain["id"] = str(call["id"])
    return plain


def _name_old_calls(messages: list[Message]) -> None:
    """Give each tool call without an id a new one, and its result the same id, matched in order."""
    waiting: list[str] = []
    number = 0
    for message in messages:
        for call in message.get("tool_calls", []):
            if call.get("id") is None:
                call["id"] = f"call_{number:024d}"
                number += 1
                waiting.append(call["id"])
        if message["role"] == "tool" and message.get("tool_call_id") is None and waiting:
            message["tool_call_id"] = waiting.pop(0)
