"""Convert the input items of ``POST /v1/responses`` to messages."""

from __future__ import annotations

import json
from typing import Any

from engine.server.conversation import (
    Message,
    content_of,
    known_role,
    last_answer,
    plain_content,
    plain_message,
    think,
)
from engine.server.errors import field_error
from engine.server.picture_parts import Part
from engine.server.responses_tools import flat_name
from engine.server.speech.custom import INPUT

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
ACTIONS = {
    "local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation",
    "computer_call": "action",
}  # fmt: skip
"""Types of calls that the client runs, and the field of such a call that has its arguments."""
OUTPUTS = (
    "function_call_output", "custom_tool_call_output", "local_shell_call_output",
    "shell_call_output", "apply_patch_call_output", "computer_call_output",
)  # fmt: skip
LEFT_OUT = (
    "additional_tools", "code_interpreter_call", "compaction", "compaction_trigger",
    "configuration_update", "file_search_call",
    "image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_list_tools",
    "program", "program_output", "tool_search_call", "tool_search_output", "web_search_call",
)  # fmt: skip
"""Items about what a server did. They have no text for the model and are left out."""


def messages_of(given: str | list[dict[str, Any]] | None) -> list[Message]:
    """Convert input items to messages; join consecutive assistant items. Raises ``ApiError``."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if len(given) > MAX_ITEMS:
        raise field_error("input", f"has {len(given)} items, the limit is {MAX_ITEMS}: send fewer")
    messages: list[Message] = []
    for item in given:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Message], item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        _add_message(messages, item)
    elif kind == "function_call":
        _call(messages, item, item.get("name"), item.get("arguments"))
    elif kind == "custom_tool_call":
        _call(messages, item, item.get("name"), {INPUT: item.get("input")})
    elif kind in ACTIONS:
        several = item.get("actions")  # of a computer
        given = item.get(ACTIONS[kind]) if several is None else {"actions": several}
        _call(messages, item, kind.removesuffix("_call"), _given(given))
    elif kind == "mcp_call":
        _call(messages, item, item.get("name"), item.get("arguments"))
        _result(messages, item)
    elif kind in OUTPUTS:
        _result(messages, item)
    elif kind == "reasoning":
        text = plain_content(item.get("content") or item.get("summary") or "", "input")
        if text:
            think(last_answer(messages), text)
    elif kind not in LEFT_OUT:
        raise field_error(
            "input",
            f"has an item of type {kind!r:.40}, which is not supported: use messages, "
            "reasoning, and tool calls with their outputs",
        )


def _given(action: Any) -> Any:
    """The arguments of a tool call, without fields that are null at any depth."""
    if isinstance(action, list):
        return [_given(each) for each in action]
    if not isinstance(action, dict):
        return action
    return {key: _given(value) for key, value in action.items() if value is not None}


def _add_message(messages: list[Message], item: dict[str, Any]) -> None:
    role, content = known_role(item.get("role"), ROLES, "input"), item.get("content")
    if role == "assistant":
        last_answer(messages)["content"] += plain_content(content, "input")
    elif plain := plain_message({"role": role, "content": content}, "input"):
        messages.append(plain)


def _call(messages: list[Message], item: dict[str, Any], name: Any, arguments: Any) -> None:
    function = {"name": flat_name(name, item.get("namespace")), "arguments": arguments}
    call = {"id": _id_of(item), "type": "function", "function": function}
    last_answer(messages).setdefault("tool_calls", []).append(call)


def _result(messages: list[Message], item: dict[str, Any]) -> None:
    messages.append({"role": "tool", "tool_call_id": _id_of(item), "content": _output_of(item)})


def _output_of(item: dict[str, Any]) -> str | list[Part]:
    output = item.get("output")
    if output is None:
        output = item.get("error") or item.get("status") or ""
    if item.get("type") == "computer_call_output" and isinstance(output, dict):
        output = [{**output, "type": "input_image"}]  # a screenshot
        return content_of(output, "input")
    if item.get("type") in ("function_call_output", "custom_tool_call_output"):
        return content_of(output, "input")
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def _id_of(item: dict[str, Any]) -> Any:
    """The id of the tool call that an item makes or answers."""
    return item.get("call_id") or item.get("id")
