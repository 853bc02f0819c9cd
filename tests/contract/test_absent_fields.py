"""A field that is null, or has a value that asks for nothing, is as if it were not there."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from support.api_types import CREATE, bodies_of, nulls_of

from engine.errors import RequestError
from engine.server.bodies import ChatRequest, CompletionRequest, read
from engine.server.completions import prompts_of, refuse_unsupported
from engine.server.conversation import plain_messages
from engine.server.dialogue import check_body
from engine.server.errors import ApiError
from engine.server.messages_body import MessagesRequest
from engine.server.messages_body import chat_of as chat_of_message
from engine.server.responses_body import ResponsesRequest
from engine.server.responses_body import chat_of as chat_of_response
from engine.server.speech.tools import tools_of

pytest.importorskip("openai")
pytest.importorskip("anthropic")

READ_ELSEWHERE = ("messages", "tools", "tool_choice", "response_format", "structured_outputs")
WITHOUT_EFFECT = ("prompt_cache_options", "web_search_options")


def meaning(path: str, body: Any) -> Any:
    """What a body asks for; status and parameter of its error."""
    try:
        return _meaning(path, json.dumps(body).encode())
    except ApiError as error:
        return error.status, error.param
    except RequestError as error:
        return 400, error.param


def _meaning(path: str, body: bytes) -> Any:
    if path == "/v1/completions":
        asked = read(body, CompletionRequest)
        refuse_unsupported(asked)
        fields = {k: v or None for k, v in msgspec.structs.asdict(asked).items()}
        return fields, prompts_of(asked), asked.sampling(max_tokens=8, logprobs=None)
    if path == "/v1/chat/completions":
        chat = read(body, ChatRequest)
    elif path == "/v1/responses":
        chat = chat_of_response(read(body, ResponsesRequest), [])
    else:
        chat = chat_of_message(read(body, MessagesRequest))
    check_body(chat)
    tools = tools_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    left_out = (*READ_ELSEWHERE, *WITHOUT_EFFECT)
    fields = {k: v for k, v in msgspec.structs.asdict(chat).items() if k not in left_out}
    return (
        fields,
        plain_messages(chat.messages, []),
        tools,
        chat.sampling(max_tokens=8, logprobs=None),
    )


@pytest.mark.parametrize("path", CREATE)
def test_null_is_absence(path: str) -> None:
    """Parameters: all optional ones of the clients' packages, at any depth."""
    tried = list(nulls_of(path))
    wrong = [each for each in tried if meaning(path, each.null) != meaning(path, each.absent)]
    assert not wrong
    assert len(tried) > 15


@pytest.mark.parametrize("path", CREATE)
def test_every_parameter_is_taken_or_refused_by_name(path: str) -> None:
    for name, body in bodies_of(path):
        try:
            _meaning(path, json.dumps(body).encode())
        except (ApiError, RequestError) as error:
            assert getattr(error, "status", 400) == 400, name
            assert name in str(error), (name, str(error))


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NOTHING = [
    ("/v1/chat/completions", CHAT, [
        {"functions": None, "function_call": None}, {"functions": []}, {"function_call": "none"},
        {"modalities": ["text"]}, {"modalities": []}, {"prediction": None}, {"audio": None},
        {"stream_options": {"include_usage": None}}, {"stream_options": None, "stream": None},
        {"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}, {"n": None}, {"tools": []},
        {"use_beam_search": False, "length_penalty": 1.0, "echo": False, "best_of": 1},
        {"anything": None}, {"parallel_tool_calls": None, "tool_choice": None},
        {"response_format": None}, {"response_format": {"type": "text"}},
        {"metadata": {"a": None}},
    ]),
    ("/v1/completions", {"prompt": "a"}, [
        {"suffix": None}, {"suffix": ""}, {"best_of": None}, {"anything": None}, {"echo": None},
    ]),
    ("/v1/messages", CHAT, [
        {"container": None}, {"mcp_servers": []}, {"speed": "standard"}, {"thinking": None},
        {"system": None}, {"system": []}, {"tools": []}, {"stop_sequences": None},
        {"thinking": {"type": "disabled"}}, {"output_config": {}},
        {"output_config": {"format": None}},
    ]),
    ("/v1/responses", {"input": "hi"}, [
        {"conversation": None, "prompt": None}, {"top_logprobs": 0}, {"tools": []},
        {"reasoning": {"effort": None}}, {"text": {"format": None}}, {"context_management": []},
        {"background": False}, {"truncation": "disabled"}, {"moderation": None}, {"include": []},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "fields"), NOTHING)
def test_values_that_ask_for_nothing(path: str, body: Any, fields: list[Any]) -> None:
    plain = meaning(path, {"model": "m", **body})
    assert plain[0] != 400
    for each in fields:
        got = meaning(path, {"model": "m", **body, **each})
        assert got[-3:] == plain[-3:], each


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {**CHAT, "modalities": ["text", "audio"]}, "modalities"),
        ("/v1/chat/completions", {**CHAT, "functions": [{"name": "f"}]}, "functions"),
        ("/v1/chat/completions", {**CHAT, "prediction": {"type": "content"}}, "prediction"),
        ("/v1/chat/completions", {**CHAT, "use_beam_search": True}, "use_beam_search"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/messages", {**CHAT, "speed": "fast"}, "speed"),
        ("/v1/messages", {**CHAT, "mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ("/v1/messages", {**CHAT, "container": "c"}, "container"),
        ("/v1/responses", {"input": "hi", "conversation": "c"}, "conversation"),
        ("/v1/responses", {"input": "hi", "prompt": {"id": "p"}}, "prompt"),
        ("/v1/responses", {"input": "hi", "background": True}, "background"),
    ],
)
def test_what_asks_for_more_is_refused_by_name(path: str, body: Any, name: str) -> None:
    with pytest.raises(ApiError, match=name) as refused:
        _meaning(path, json.dumps({"model": "m", **body}).encode())
    assert refused.value.status == 400 and refused.value.param == name
