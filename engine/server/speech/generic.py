"""Describe tools as text, for chat templates without tools or with unknown formats of calls.

Tool calls and results become text too, so a conversation has three roles only (``adapt`` handles
templates without a system role):

    system      the system text, the tools, and the format in which to call them
    assistant   "Let me see.\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>"
    user        "<tool_response>\\n...\\n</tool_response>"
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.server.conversation import Message, joined_turns
from engine.server.speech.families import GENERIC_CALLS

INTRODUCTION = """\
You can call tools. These are their names, their descriptions and the JSON schemas of their \
arguments, one tool a line:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as JSON in this form:
{form}
To call several, write one after the other. Then stop: the results come in the next message, \
between <tool_response> and </tool_response>. Where no tool helps, answer without."""


def as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Convert a conversation to plain text messages, with a description of the tools first."""
    found = joined_turns(_turn(message) for message in messages)
    if not tools:
        return found
    begins = bool(found) and found[0]["role"] == "system"
    system = [found.pop(0)["content"]] if begins else []
    text = "\n\n".join([*filter(None, system), introduction(tools)])
    return [{"role": "system", "content": text}, *found]


def introduction(tools: Sequence[dict[str, Any]]) -> str:
    """The text that describes the tools and how to call them."""
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    form = call_text("NAME", {"ARGUMENT": "VALUE"})
    return INTRODUCTION.format(tools=lines, form=form)


def call_text(name: str, arguments: Any) -> str:
    """Write a tool call in the format that ``introduction`` explains to the model."""
    call = _json({"name": name, GENERIC_CALLS.key: arguments})
    return f"{GENERIC_CALLS.begin}{call}{GENERIC_CALLS.end}"


def _turn(message: Message) -> Message:
    """Convert a message, so that its tool calls or results become text."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    written = [call_text(call["name"], call["arguments"]) for call in calls]
    kept = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
    return {**kept, "content": "\n".join([*filter(None, [content]), *written])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
