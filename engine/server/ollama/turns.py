"""Ollama's messages, converted to OpenAI's."""

from __future__ import annotations

from typing import Any

from engine.server.conversation import Message, known_role
from engine.server.errors import field_error
from engine.server.picture_parts import SHOWING, Part

ROLES = ("system", "user", "assistant", "tool")
LEFT_OUT = ("images", "tool_name")


def messages_of(given: list[dict[str, Any]]) -> list[Message]:
    """Convert messages. Ollama's tool calls have no ids, and results name their tool; here each
    gets the id of the first call of that tool without a result. Raises ``ApiError``."""
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for place, each in enumerate(given):
        role = each.get("role")
        role = known_role(role.lower() if isinstance(role, str) else role, ROLES, "messages")
        message = {key: value for key, value in each.items() if key not in LEFT_OUT}
        message["role"] = role
        if each.get("images"):
            if role not in SHOWING:
                raise field_error(
                    "messages", f"has images in a message of role {role}: move them to a user's"
                )
            message["content"] = with_images(each.get("content"), each["images"], "messages")
        if calls := each.get("tool_calls"):
            message["tool_calls"] = _calls_of(calls, place, waiting)
        if role == "tool":
            _name_result(message, each.get("tool_name"), waiting)
        messages.append(message)
    return messages


def with_images(text: Any, images: Any, param: str) -> list[Part]:
    """The parts of a message with images, which are files in base64. Raises ``ApiError``."""
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise field_error(param, f"has images {images!r:.40}, must be a list of files in base64")
    urls = [each if each[:5] == "data:" else f"data:;base64,{each}" for each in images]
    parts: list[Part] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _calls_of(calls: Any, place: int, waiting: list[tuple[str, str]]) -> list[Any]:
    """The calls of message ``place`` with ids, added to ``waiting``."""
    if not isinstance(calls, list):
        raise field_error("messages", f"has tool_calls {calls!r:.80}, must be a list of calls")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise field_error(
                "messages",
                f"has {call!r:.80} in tool_calls, must have a function with name and arguments",
            )
        call_id = str(call.get("id") or f"call_{place}_{number}")
        about = {"name": function["name"], "arguments": function.get("arguments") or {}}
        found.append({"id": call_id, "type": "function", "function": about})
        waiting.append((call_id, function["name"]))
    return found


def _name_result(message: Message, tool: Any, waiting: list[tuple[str, str]]) -> None:
    """Set the id of the call that a result belongs to, and take it from ``waiting``."""
    if isinstance(tool, str) and tool:
        message["name"] = tool
    wanted = message.get("tool_call_id")
    fitting = [call for call in waiting if wanted in (None, "", call[0])]
    named = [call for call in fitting if call[1] == tool]
    for call in (named or fitting)[:1]:
        message["tool_call_id"] = call[0]
        waiting.remove(call)
