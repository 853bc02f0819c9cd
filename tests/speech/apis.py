"""The APIs whose answers have calls: the request to each, and the meaning of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec

from engine.server.answers import HttpAnswer
from engine.server.bodies import ChatRequest
from engine.server.chat import Chat
from engine.server.dialogue import LoadedChatModel
from engine.server.messages import Messages
from engine.server.messages_body import MessagesRequest
from engine.server.ollama.answers import ChatAnswer
from engine.server.ollama.bodies import ChatBody
from engine.server.responses import Responses, ResponseStore
from engine.server.responses_body import ResponsesRequest
from engine.server.speech.turns import ChatFormat

from .families import TOOLS
from .playing import FakeEngine, FakeModel, Read

USER = [{"role": "user", "content": "Hi"}]
FUNCTIONS = [each["function"] for each in TOOLS]


class Api(NamedTuple):
    """How a request is made, and an answer read: whole, and from its events."""

    ask: Callable[[LoadedChatModel, bool], HttpAnswer]
    whole: Callable[[Any], Read]
    streamed: Callable[[list[Any]], Read]
    ends: dict[str, str]
    """What is said of a call that is whole, and of an answer that was cut."""
    end: Callable[[Any], str]
    last: int  # the event that has it
    has_arguments: Callable[[Any], bool]  # of an event: whether it has some of a call


def voice_of(speech: ChatFormat, engine: FakeEngine) -> LoadedChatModel:
    return LoadedChatModel(cast(Any, FakeModel(engine)), speech)


def asked_of(name: str, *, stream: bool) -> dict[str, Any]:
    """A request of this API with the tools of the corpus."""
    asked: dict[str, Any] = {"model": "m", "stream": stream}
    if name in ("chat", "ollama"):
        return {**asked, "messages": USER, "tools": TOOLS}
    if name == "responses":
        tools = [{"type": "function", **function} for function in FUNCTIONS]
        return {**asked, "input": "Hi", "tools": tools, "store": False}
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    return {**asked, "messages": USER, "tools": tools, "max_tokens": 2000, "thinking": thinking}


def _chat(loaded: LoadedChatModel, stream: bool) -> HttpAnswer:
    asked = asked_of("chat", stream=stream)
    return Chat(loaded, msgspec.convert(asked, ChatRequest), "m")


def _whole_chat(answer: Any) -> Read:
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    thinking = message.get("reasoning_content") or ""
    assert all(call["id"] and call["type"] == "function" for call in message.get("tool_calls", []))
    return Read(
        message["content"] or "", thinking, [(each["name"], each["arguments"]) for each in calls]
    )


def _streamed_chat(events: list[Any]) -> Read:
    content, thinking = "", ""
    calls: list[list[str]] = []
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        thinking += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            else:
                assert call["index"] == len(calls) - 1 and "name" not in call["function"]
            calls[-1][1] += call["function"]["arguments"]
    return Read(content, thinking, [(name, arguments) for name, arguments in calls])


def _responses(loaded: LoadedChatModel, stream: bool) -> HttpAnswer:
    asked = asked_of("responses", stream=stream)
    return Responses(loaded, msgspec.convert(asked, ResponsesRequest), "m", ResponseStore(), "")


def _whole_response(answer: Any) -> Read:
    content, thinking, calls = "", "", []
    for item in answer["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            thinking += "".join(part["text"] for part in item["content"])
        else:
            content += "".join(part["text"] for part in item["content"])
    return Read(content, thinking, calls)


def _streamed_response(events: list[Any]) -> Read:
    """Its deltas; the items that are done have the same."""
    content, thinking = "", ""
    calls: list[list[str]] = []
    done = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added" and event["item"]["type"] == "function_call":
            assert event["item"]["arguments"] == ""
            calls.append([event["item"]["name"], ""])
        elif kind == "output_text.delta":
            content += event["delta"]
        elif kind == "reasoning_text.delta":
            thinking += event["delta"]
        elif kind == "function_call_arguments.delta":
            calls[-1][1] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert [event["name"], event["arguments"]] == calls[-1]
        elif kind == "output_item.done":
            done.append(event["item"])
    read = Read(content, thinking, [(name, arguments) for name, arguments in calls])
    assert _whole_response({"output": done}) == read
    assert events[-1]["response"]["output"] == done
    return read


def _messages(loaded: LoadedChatModel, stream: bool) -> HttpAnswer:
    asked = asked_of("messages", stream=stream)
    return Messages(loaded, msgspec.convert(asked, MessagesRequest), "m")


def _whole_message(answer: Any) -> Read:
    blocks = answer["content"]
    return Read(
        "".join(each["text"] for each in blocks if each["type"] == "text"),
        "".join(each["thinking"] for each in blocks if each["type"] == "thinking"),
        [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"],
    )


def _streamed_message(events: list[Any]) -> Read:
    blocks: list[Any] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) and not is_open
            is_open = True
            blocks.append(event["content_block"] | {"input": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1 and is_open
            delta = event["delta"]
            field = delta["type"].removesuffix("_delta").replace("input_json", "input")
            blocks[-1][field] += delta.get(field) or delta.get("partial_json") or ""
        elif event["type"] == "content_block_stop":
            is_open = False
    assert not is_open and events[-1]["type"] == "message_stop"
    return _whole_message({"content": blocks})


def _ollama(loaded: LoadedChatModel, stream: bool) -> HttpAnswer:
    wanted = asked_of("ollama", stream=stream)
    return ChatAnswer(loaded, msgspec.convert(wanted, ChatBody), "m")


def _whole_ollama(answer: Any) -> Read:
    message = answer["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    assert [call["index"] for call in calls] == [*range(len(calls))]
    assert all(call["id"] for call in message.get("tool_calls") or [])
    written = [(call["name"], json.dumps(call["arguments"])) for call in calls]
    return Read(message["content"], message.get("thinking", ""), written)


def _streamed_ollama(lines: list[Any]) -> Read:
    assert [line["done"] for line in lines] == [*([False] * (len(lines) - 1)), True]
    messages = [line["message"] for line in lines]
    parts: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
    for message in messages:
        parts["content"] += message["content"]
        parts["thinking"] += message.get("thinking", "")
        parts["tool_calls"] += message.get("tool_calls", [])
    assert messages[-1] == {"role": "assistant", "content": ""}
    return _whole_ollama({"message": parts})


APIS = {
    "chat": Api(
        _chat,
        _whole_chat,
        _streamed_chat,
        {"stop": "tool_calls", "length": "length"},
        lambda answer: answer["choices"][0]["finish_reason"],
        -1,
        lambda event: bool(event["choices"][0]["delta"].get("tool_calls")),
    ),
    "responses": Api(
        _responses,
        _whole_response,
        _streamed_response,
        {"stop": "completed", "length": "incomplete"},
        lambda answer: answer.get("response", answer)["status"],
        -1,
        lambda event: event["type"] == "response.function_call_arguments.delta",
    ),
    "messages": Api(
        _messages,
        _whole_message,
        _streamed_message,
        {"stop": "tool_use", "length": "max_tokens"},
        lambda answer: answer.get("delta", answer)["stop_reason"],
        -2,
        lambda event: event.get("delta", {}).get("type") == "input_json_delta",
    ),
    "ollama": Api(
        _ollama,
        _whole_ollama,
        _streamed_ollama,
        {"stop": "stop", "length": "length"},
        lambda answer: answer["done_reason"],
        -1,
        lambda event: bool(event["message"].get("tool_calls")),
    ),
}
