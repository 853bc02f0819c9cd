"""Errors name the field that the client has sent, in each API, and the value once."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from support import source_tree as tree

from engine.errors import PromptTooLongError, RequestError
from engine.messages.params import SamplingParams
from engine.messages.structured import StructuredOutputsParams
from engine.server.blame import with_client_names
from engine.server.bodies import ChatRequest, CompletionRequest, read
from engine.server.errors import ApiError, as_api_error
from engine.server.messages_body import MessagesRequest
from engine.server.messages_body import chat_of as chat_of_message
from engine.server.responses_body import ResponsesRequest
from engine.server.responses_body import chat_of as chat_of_response

TEXT, CHAT, RESPONSE, MESSAGE = (
    (CompletionRequest, {"model": "m", "prompt": "x"}),
    (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    (ResponsesRequest, {"model": "m", "input": "x"}),
    (MessagesRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
)
APIS: tuple[tuple[Any, dict[str, Any]], ...] = (TEXT, CHAT, RESPONSE, MESSAGE)
CHECKING = (
    "engine/frontend/prompt.py",
    "engine/llm.py",
    "engine/messages/params.py",
    "engine/messages/requests.py",
    "engine/sched/step/intake.py",
)
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


def wrong(api: tuple[Any, dict[str, Any]], **fields: Any) -> ApiError:
    kind, good = api
    with pytest.raises(ApiError) as told:
        read(json.dumps({**good, **fields}).encode(), kind)
    return told.value


# -- of the engine


@pytest.mark.parametrize(
    "fields", [{}, {"regex": ""}, {"json": "{"}, {"choice": [5]}, {"backend": "x", "regex": "a"}]
)
def test_forms_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as told:
        StructuredOutputsParams(**fields)
    assert told.value.param == "structured_outputs"


def test_every_error_about_a_field_names_it() -> None:
    """Where parameters, prompts and options of requests are checked."""
    nameless = [
        f"{module.where}:{call.lineno}"
        for module in tree.sources()
        if module.where in CHECKING
        for name, function in module.functions()
        if name != "check_plain"  # arguments of utilities, which are no fields of a request
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") in ("RequestError", "RequestTypeError")
        and not any(keyword.arg == "param" for keyword in call.keywords)
    ]
    assert not nameless, nameless


# -- of the body


@pytest.mark.parametrize("api", APIS, ids=lambda api: api[0].__name__)
def test_an_unknown_field_is_named_with_what_was_meant(api: Any) -> None:
    error = wrong(api, temprature=1)
    assert (error.status, error.code, error.param) == (400, "unknown_parameter", "temprature")
    assert error.message.count("temprature") == 1 and "did you mean 'temperature'?" in error.message
    assert "did you mean" not in wrong(api, num_beams=4).message


@pytest.mark.parametrize(
    ("api", "typed", "meant"),
    [
        (TEXT, "max_completion_tokens", "max_tokens"),
        (RESPONSE, "max_tokens", "max_output_tokens"),
        (RESPONSE, "messages", "input"),
        (MESSAGE, "stop", "stop_sequences"),
        (MESSAGE, "instructions", "system"),
        (CHAT, "stop_sequences", "stop"),
    ],
)
def test_a_field_of_another_api_is_named_as_this_one_has_it(
    api: Any, typed: str, meant: str
) -> None:
    assert wrong(api, **{typed: "x"}).message.endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("api", "fields", "param", "code"),
    [
        (TEXT, {"stop": ["a", 3]}, "stop[1]", "invalid_type"),
        (TEXT, {"prompt": [[5, "a"]]}, "prompt[0][1]", "invalid_type"),
        (TEXT, {"logit_bias": {"5": "x"}}, "logit_bias.5", "invalid_type"),
        (TEXT, {"stream_options": {"include_usge": True}}, "stream_options.include_usge",
         "unknown_parameter"),
        (CHAT, {"messages": ["x"]}, "messages[0]", "invalid_type"),
        (CHAT, {"messages": None}, "messages", "missing_required_parameter"),
        (RESPONSE, {"truncation": "disable"}, "truncation", "invalid_value"),
        (RESPONSE, {"text": {"formt": {}}}, "text.formt", "unknown_parameter"),
    ],
)  # fmt: skip
def test_the_path_to_what_is_wrong_is_given(
    api: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    error = wrong(api, **fields)
    assert (error.status, error.param, error.code) == (400, param, code)
    assert param in error.message


def test_a_value_is_shown_once() -> None:
    for error in (wrong(TEXT, n="twofold"), wrong(RESPONSE, truncation="twofold")):
        assert error.message.count("twofold") == 1
    assert "y" * 100 not in wrong(TEXT, n="y" * 5000).message
    assert len(wrong(TEXT, **{"z" * 5000: 1}).message) < 300


def test_choices_are_listed_and_the_near_one_is_meant() -> None:
    message = wrong(RESPONSE, truncation="disable").message
    assert "auto, disabled" in message and message.endswith("did you mean 'disabled'?")
    assert "did you mean" not in wrong(RESPONSE, truncation="twofold").message


# -- in the words of each API


@pytest.mark.parametrize(
    ("api", "given", "engine", "param"),
    [
        (TEXT, {}, "prompt_token_ids", "prompt"),
        (TEXT, {"response_format": SCHEMA}, "structured_outputs", "response_format"),
        (CHAT, {"max_completion_tokens": 0}, "max_tokens", "max_completion_tokens"),
        (CHAT, {}, "prompt", "messages"),
        (CHAT, {"top_logprobs": 5}, "logprobs", "top_logprobs"),
        (CHAT, {"tools": []}, "grammar", "tools"),
        (CHAT, {"response_format": SCHEMA, "tools": []}, "grammar", "response_format"),
        (RESPONSE, {"max_output_tokens": 0}, "max_tokens", "max_output_tokens"),
        (RESPONSE, {}, "messages", "input"),
        (RESPONSE, {"text": {}}, "response_format", "text.format"),
        (MESSAGE, {"max_tokens": 0}, "max_completion_tokens", "max_tokens"),
        (MESSAGE, {}, "stop", "stop_sequences"),
        (MESSAGE, {}, "min_tokens", None),
    ],
)
def test_fields_are_called_as_the_client_has_them(
    api: Any, given: dict[str, Any], engine: str, param: str | None
) -> None:
    kind, good = api
    asked = read(json.dumps({**good, **given}).encode(), kind)
    error = RequestError(f"{engine} is -5, must be at least 1", param=engine)
    told = with_client_names(asked, as_api_error(error))
    assert told.param == param
    assert told.message == f"{param or engine} is -5, must be at least 1"


def test_other_fields_in_a_message_are_called_so_too() -> None:
    kind, good = RESPONSE
    asked = kind(**good, min_tokens=20, max_output_tokens=5)
    with pytest.raises(RequestError) as told:
        SamplingParams(min_tokens=20, max_tokens=5)
    message = with_client_names(asked, as_api_error(told.value)).message
    assert message == "min_tokens is 20, must be at most max_output_tokens (5)"


def test_words_that_are_no_fields_stay() -> None:
    asked = CHAT[0](**CHAT[1])
    error = PromptTooLongError("x", param="prompt", length="9 tokens", limit=8)
    told = with_client_names(asked, as_api_error(error))
    assert told.param == "messages" and "the prompt is too long" in told.message


# -- a prompt that is too long, as clients tell it apart

LITELLM = "this model's maximum context length is"
"""In `litellm.litellm_core_utils.exception_mapping_utils`, of the lower-cased text."""
LANGCHAIN = "prompt is too long"
"""In `langchain_anthropic.chat_models` and `langchain_openai.chat_models.base`."""
CODE = "context_length_exceeded"
"""In `langchain_openai.chat_models.base`, of the whole error."""


@pytest.mark.parametrize("length", ["5000 tokens", "at least 5000 tokens"])
def test_clients_know_a_prompt_that_is_too_long(length: str) -> None:
    error = as_api_error(PromptTooLongError("x", param="prompt", length=length, limit=4096))
    for body in (error.body().decode(), json.dumps(error.anthropic())):
        assert LITELLM in body.lower() and LANGCHAIN in body
        assert (
            f"{length} > 4095 maximum" in body and "maximum context length is 4096 tokens" in body
        )
    assert CODE in error.body().decode()
    assert error.message.count("5000") == 1 and "--max-model-len" in error.message


# -- in the words of the API that was spoken to

TOOL = {"name": "look", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice has type 'any' without tools"),
        ({"tool_choice": {"type": "tool", "name": "a"}}, "tool_choice has type 'tool' without"),
        (
            {"tools": [{**TOOL, "input_schema": {"type": "string"}}]},
            "tools has 'look' with input_schema",
        ),
        ({"tools": [{**TOOL, "input_schema": []}]}, "tools has 'look' with input_schema []"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config has a format"),
        ({"output_format": {"type": "json_schema"}}, "output_format has a format"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 5}]}]},
            "messages has a part whose name is 5",
        ),
    ],
    ids=str,
)
def test_messages_speak_of_what_was_sent(fields: dict[str, Any], message: str) -> None:
    asked = read(json.dumps({**MESSAGE[1], **fields}).encode(), MessagesRequest)
    with pytest.raises(ApiError) as told:
        chat_of_message(asked)
    assert message in told.value.message and told.value.param in fields
    assert "json_schema.schema" not in told.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": {"type": "function", "name": "a"}}, "'name': 'a'} without tools"),
        ({"tool_choice": {"type": "functoin", "name": "a"}}, "did you mean 'function'?"),
        ({"text": {"format": {"type": "json"}}}, "text.format is {'type': 'json'}, must"),
        ({"text": {"format": {"type": "json_schema"}}}, "or json_schema with a schema"),
    ],
    ids=str,
)
def test_responses_speak_of_what_was_sent(fields: dict[str, Any], message: str) -> None:
    asked = read(json.dumps({**RESPONSE[1], **fields}).encode(), ResponsesRequest)
    with pytest.raises(ApiError) as told:
        chat_of_response(asked, [])
    assert message in told.value.message
    assert told.value.param in ("tool_choice", "text.format")


@pytest.mark.parametrize(
    ("text", "half"), [(r"a \ud83d", r"\ud83d"), (r"\ude00", r"\ude00"), (r"\ud83dab", r"\ud83d")]
)
def test_half_of_a_character_is_shown(text: str, half: str) -> None:
    """Clients cut texts in the middle of what is two halves to them."""
    with pytest.raises(ApiError, match="half of a surrogate pair") as told:
        read(f'{{"model": "m", "prompt": "{text}"}}'.encode(), CompletionRequest)
    assert half in told.value.message


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(ApiError, match="the body is empty"):
        read(b" ", CompletionRequest)
