"""Tools for chat templates that know none: listed in the system's text, calls and results as texts.

A template of no known family (``families.py``) has no variable for tools, or writes calls in a form
that nobody here reads; some have no system either, nor a role for results. So all of it becomes
words in the turns that every template has:

    system      its own words, and the tools with the form in which they are called
    assistant   "Let me see.\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>"
    user        "<tool_response>\\n...\\n</tool_response>"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from engine.errors import RequestError
from engine.server.speech.families import GENERIC_CALLS
from engine.text.tokenizer import Tokenizer

Message = dict[str, Any]
PROBE = "a text that no template has"
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


def in_words(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, has_system: bool
) -> list[Message]:
    """The conversation in turns of text alone; has_system: whether the template takes one."""
    found: list[Message] = []
    for message in messages:
        for each in _turns(message):
            _add(found, each)
    if not tools:
        return found
    begins = bool(found) and found[0]["role"] == "system"
    system = [found.pop(0)["content"]] if begins else []
    text = "\n\n".join([*filter(None, system), introduction(tools)])
    if has_system:
        return [{"role": "system", "content": text}, *found]
    if found and found[0]["role"] == "user":
        text = f"{text}\n\n{found.pop(0)['content']}"
    return [{"role": "user", "content": text}, *found]


def introduction(tools: Sequence[dict[str, Any]]) -> str:
    """What the tools are and how they are called."""
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    form = call_text("NAME", {"ARGUMENT": "VALUE"})
    return INTRODUCTION.format(tools=lines, form=form)


def call_text(name: str, arguments: Any) -> str:
    """A call as the model writes it."""
    call = _json({"name": name, GENERIC_CALLS.key: arguments})
    return f"{GENERIC_CALLS.begin}{call}{GENERIC_CALLS.end}"


@lru_cache(maxsize=8)
def takes_system(tokenizer: Tokenizer, chat_template: str | None) -> bool:
    """Whether words of the system reach the prompt: some templates refuse them, or leave them
    out. chat_template: to use instead of the model's own."""
    messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "Hi"}]
    try:
        return PROBE in tokenizer.apply_chat_template(messages, chat_template=chat_template)
    except RequestError:
        return False


def _turns(message: Message) -> Iterator[Message]:
    """The message without what only some templates know."""
    content = message.get("content") or ""
    if message["role"] in ("tool", "function"):
        yield {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        return
    calls = [call["function"] for call in message.get("tool_calls") or []]
    written = [call_text(call["name"], call["arguments"]) for call in calls]
    kept = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
    yield {**kept, "content": "\n".join([*filter(None, [content]), *written])}


def _add(found: list[Message], message: Message) -> None:
    """Results, and the words after them, are one turn of the user."""
    last = found[-1] if found else None
    if last is not None and last["role"] == message["role"] == "user":
        found[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
    else:
        found.append(message)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
