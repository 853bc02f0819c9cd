"""Tools, responses and messages through the clients that people use, over a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import HERMES
from support.openai_events import events_of
from support.served import Served, forked

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

MODEL = "box"
COMMON = ("--num-threads", "1", "--max-model-len", "768", "--num-kv-blocks", "400")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS},
}
OTHER = {"type": "function", "function": {"name": "clock"}}
UNTHOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
ASK = [{"role": "user", "content": "The weather in Rome"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template: Path = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(HERMES)
    options = ("--served-model-name", MODEL, *COMMON, "--chat-template", str(template))
    with forked(*options) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Served) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def check(arguments: Any) -> None:
    """Assert that they follow the schema."""
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Rome", "Paris") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_tool_that_must_be_called(client: Any, choice: Any) -> None:
    asked = {"model": MODEL, "messages": ASK, "tools": [TOOL], "tool_choice": choice, "seed": 1}
    asked |= {"parallel_tool_calls": False, "extra_body": UNTHOUGHT}
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.function.name == "weather"
    check(json.loads(call.function.arguments))
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls" and streamed.id.startswith("call_")


@pytest.mark.parametrize("strict", [False, True])
def test_tools_and_a_form_of_the_text(client: Any, strict: bool) -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "strict": strict}}
    schema = {"type": "object", "properties": {"ok": {"enum": [True]}}, "required": ["ok"]}
    form = {"name": "answer", "schema": {**schema, "additionalProperties": False}}
    asked = {"model": MODEL, "messages": ASK, "tools": [tool], "extra_body": UNTHOUGHT}
    asked["response_format"] = {"type": "json_schema", "json_schema": form}
    for seed in range(3):
        choice = client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False)
        message = choice.choices[0].message
        if message.tool_calls:
            (call,) = message.tool_calls
            check(json.loads(call.function.arguments))
            assert message.content is None
        else:
            assert json.loads(message.content) == {"ok": True}
    forced = client.chat.completions.create(
        **asked, seed=1, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    (call,) = forced.choices[0].message.tool_calls
    check(json.loads(call.function.arguments))


BROKEN = {"type": "object", "properties": {"x": {"$ref": "https://example.org/x.json"}}}


def test_a_schema_that_cannot_be_enforced(client: Any) -> None:
    asked = {"model": MODEL, "messages": ASK, "extra_body": UNTHOUGHT, "seed": 1}
    broken = {"name": "broken", "parameters": BROKEN}
    tools = [{"type": "function", "function": broken}, TOOL]
    choice = {"type": "function", "function": {"name": "weather"}}
    called = client.chat.completions.create(tools=tools, tool_choice=choice, **asked)
    check(json.loads(called.choices[0].message.tool_calls[0].function.arguments))
    required = client.chat.completions.create(
        tools=tools[:1], tool_choice="required", max_tokens=60, **asked
    )
    assert required.choices[0].finish_reason in ("tool_calls", "length")
    for stream in (False, True):
        strict = [{"type": "function", "function": {**broken, "strict": True}}, TOOL]
        with pytest.raises(openai.BadRequestError, match="tool broken, which is strict") as told:
            client.chat.completions.create(tools=strict, stream=stream, **asked)
        assert told.value.param == "tools"


def test_the_result_of_a_tool_goes_back(client: Any) -> None:
    asked = {"model": MODEL, "tools": [TOOL, OTHER], "max_tokens": 8}
    call = {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'}
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    said = client.chat.completions.create(messages=messages, **asked)
    without = client.chat.completions.create(messages=messages[:1], **asked)
    assert said.usage.prompt_tokens > without.usage.prompt_tokens + 20


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tools": [{"type": "function", "function": {"name": "?"}}]}, "named '\\?'"),
        ({"tools": [TOOL], "tool_choice": "weather"}, "tool_choice is 'weather'"),
        ({"tool_choice": "required"}, "without tools"),
    ],
)
def test_wrong_tools(client: Any, asked: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model=MODEL, messages=ASK, **asked)


def test_a_template_of_no_family() -> None:
    with forked("--served-model-name", MODEL, *COMMON) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked = {"model": MODEL, "messages": ASK, "seed": 1}
        said = client.chat.completions.create(max_tokens=4, **asked)
        assert said.choices[0].message.content is not None
        listed = client.chat.completions.create(tools=[TOOL], max_tokens=4, **asked)
        assert listed.usage.prompt_tokens > said.usage.prompt_tokens + 40
        choice = {"type": "function", "function": {"name": "weather"}}
        called = client.chat.completions.create(tools=[TOOL], tool_choice=choice, **asked)
        (call,) = called.choices[0].message.tool_calls
        check(json.loads(call.function.arguments))
        messages = [*ASK, called.choices[0].message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        after = client.chat.completions.create(**{**asked, "messages": messages}, max_tokens=4)
        assert after.usage.prompt_tokens > said.usage.prompt_tokens + 20


def test_special_tokens_of_a_user_are_letters(client: Any) -> None:
    def num_tokens(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        asked = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        return int(asked.usage.prompt_tokens)

    assert num_tokens("a<|im_end|>") > num_tokens("a") + 1


# Responses


def respond(client: Any, **asked: Any) -> Any:
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 24, **asked}
    return client.responses.create(**asked)


def test_a_streamed_response_is_the_whole_one(client: Any) -> None:
    asked = {"temperature": 0, "instructions": "Be brief"}
    whole = respond(client, **asked)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 24 and whole.instructions == "Be brief"
    events = list(respond(client, stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    last = events[-1].response
    assert deltas == whole.output_text == last.output_text
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in last.output]


def test_response_events_are_of_the_clients_types(server: Served) -> None:
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    adapter: Any = TypeAdapter(ResponseStreamEvent)
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    told = {"model": MODEL, "input": "Hello", "stream": True, "max_output_tokens": 24}
    called = {"tools": [tool], "tool_choice": "required", **UNTHOUGHT}
    for more in ({}, called, {"top_logprobs": 2}):
        kinds = []
        for name, event in events_of(f"{server.url}/v1/responses", {**told, **more}):
            assert name == event["type"]
            adapter.validate_python(event)
            kinds.append(name)
        assert kinds[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]


def test_a_response_calls_a_tool(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    asked = {"tools": [tool], "tool_choice": {"type": "function", "name": "weather"}}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 100, "extra_body": UNTHOUGHT}
    first = respond(client, **asked)
    (call,) = first.output
    assert call.type == "function_call" and first.status == "completed"
    check(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = respond(client, input=[result], previous_response_id=first.id)
    assert again.usage.input_tokens > respond(client).usage.input_tokens + 20
    items = [{"role": "user", "content": "Hello"}, call.model_dump(), result]
    whole = respond(client, input=items, store=False)
    assert whole.usage.input_tokens == again.usage.input_tokens


def test_stored_responses(client: Any) -> None:
    first = respond(client)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)
    unstored = respond(client, store=False)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        respond(client, previous_response_id=unstored.id)


def test_the_response_of_another_key_is_not_there(client: Any, server: Served) -> None:
    first = respond(client)
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(first.id)


def test_a_response_with_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "name": "w", "schema": PARAMETERS, "strict": True}
    said = respond(
        client, text={"format": form}, max_output_tokens=300, extra_body=UNTHOUGHT, temperature=0
    )
    check(json.loads(said.output_text))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"truncation": "auto"}, "use disabled"),
        ({"tools": [{"type": "web_serch"}]}, "type 'web_serch'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type 'item_reference'"),
    ],
)
def test_wrong_responses(client: Any, asked: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        respond(client, **asked)


# Messages


def test_a_streamed_message_is_the_whole_one(claude: Any) -> None:
    asked = {
        "model": MODEL,
        "messages": ASK,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
        "system": "Be brief",
    }
    whole = claude.messages.create(**asked)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
    assert whole.content[0].type == "text" and whole.type == "message"
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 24
    used = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert used == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief")
    assert counted.input_tokens == used


def test_a_message_calls_a_tool(claude: Any) -> None:
    tool = {"name": "weather", "description": "Of a city", "input_schema": PARAMETERS}
    asked = {"model": MODEL, "tools": [tool], "max_tokens": 100}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    first = claude.messages.create(messages=ASK, tool_choice=choice, **asked)
    (call,) = first.content
    assert first.stop_reason == "tool_use" and call.name == "weather"
    check(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And Paris?"}]},
    ]
    named = {"type": "tool", "name": "weather"}
    with claude.messages.stream(messages=messages, tool_choice=named, **asked) as stream:
        second = stream.get_final_message()
    check(second.content[-1].input)
    assert second.stop_reason == "tool_use"


def test_a_stop_sequence(claude: Any) -> None:
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 64, "extra_body": {"temperature": 0}}
    text = claude.messages.create(**asked).content[0].text
    word = text.strip()[3:6]
    said = claude.messages.create(stop_sequences=[word], **asked)
    assert said.stop_reason == "stop_sequence" and said.stop_sequence == word
    assert word not in said.content[0].text if said.content else True


def test_message_events_are_of_the_clients_types(server: Served) -> None:
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    adapter: Any = TypeAdapter(RawMessageStreamEvent)
    tool = {"name": "weather", "input_schema": PARAMETERS}
    told = {"model": MODEL, "messages": ASK, "stream": True, "max_tokens": 60}
    for more in ({}, {"tools": [tool], "tool_choice": {"type": "any"}}):
        kinds = []
        for name, event in events_of(f"{server.url}/v1/messages", {**told, **more}):
            assert name == event["type"]
            adapter.validate_python(event)
            kinds.append(name)
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "use type custom"),
        ({"messages": [*ASK, {"role": "assistant", "content": "I "}]}, "ends with white space"),
        ({"messages": []}, "at least one"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "must have type base64 or url",
        ),
    ],
)
def test_wrong_messages(claude: Any, asked: Any, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as told:
        claude.messages.create(**{"model": MODEL, "messages": ASK, "max_tokens": 4, **asked})
    assert told.value.body["error"]["type"] == "invalid_request_error"


def test_clients_that_wait_for_many(server: Served) -> None:
    async def main() -> None:
        ours = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        theirs = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)

        async def respond() -> str:
            asked = await ours.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
            return str(asked.output_text)

        async def message() -> str:
            about = {"model": MODEL, "messages": ASK, "max_tokens": 8}
            async with theirs.messages.stream(**about) as stream:
                return "".join([text async for text in stream.text_stream])

        async with ours, theirs:
            said = await asyncio.gather(*[each() for each in (respond, message) for _ in range(6)])
        assert len(said) == 12

    asyncio.run(main())


# Mistakes deep inside


CHAT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 5}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": 5}


@pytest.mark.parametrize(
    ("path", "asked", "named"),
    [
        (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": ALLOWED}, "tool_choice"),
        (CHAT, {"messages": [{"role": 5, "content": "x"}]}, "role 5"),
        (CHAT, {"messages": [{"content": "x"}]}, "role None"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "text is None",
        ),
        (CHAT, {"messages": ASK, "allowed_token_ids": [2], "min_tokens": 2}, "no token is left"),
        (RESPONSE, {"input": [{"type": "reasoning", "content": 5}]}, "content 5"),
        (RESPONSE, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        (MESSAGE, {"messages": ASK, "tool_choice": {"type": ["auto"]}}, "tool_choice"),
        (MESSAGE, {"messages": ASK, "output_config": {"format": 5}}, "format 5"),
        (MESSAGE, {"messages": [{"role": "user", "content": [RESULT]}]}, "content 5"),
    ],
)
def test_a_mistake_deep_inside_is_named(
    server: Served, path: str, asked: dict[str, Any], named: str
) -> None:
    limit = {"max_tokens": 4} if path == MESSAGE else {}
    status, body = post(server, path, {"model": MODEL, **limit, **asked})
    assert status == 400 and named in body["error"]["message"]


@pytest.mark.parametrize("broken", [{"properties": "x"}, {"required": 5}, {"properties": []}])
def test_a_tool_whose_schema_is_none(client: Any, broken: dict[str, Any]) -> None:
    function = {"name": "weather", "parameters": {"type": "object", **broken}}
    with pytest.raises(openai.BadRequestError, match="tools has weather with"):
        client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[{"type": "function", "function": function}]
        )


def test_log_probabilities_of_a_response_are_of_all_its_text(client: Any) -> None:
    for stop in ([], ["this is not in the text"]):
        more = {"stop": stop, "ignore_eos": True}
        said = respond(client, top_logprobs=1, temperature=0, extra_body=more)
        (item,) = said.output
        (part,) = item.content
        assert len(part.logprobs) == said.usage.output_tokens
        assert item.status == said.status == "incomplete"


def test_thinking_and_calls_go_back_in_order(client: Any) -> None:
    def num_tokens(items: list[dict[str, Any]]) -> int:
        said = respond(client, input=items, max_output_tokens=1)
        return int(said.usage.input_tokens)

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    once = [{"role": "user", "content": "Hi"}, thought("one")]
    said = {"role": "assistant", "content": "I look."}
    assert num_tokens([*once, thought("and two"), said]) > num_tokens([*once, said])


def post(server: Served, path: str, asked: Any) -> tuple[int, Any]:
    answer = server.ask(path, asked)
    return answer.status, answer.json
