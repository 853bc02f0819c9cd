"""Pictures through the clients that people use, over a running server with a model that sees."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.picture_requests import (
    COMMON,
    FILE,
    NAME,
    chat,
    data_url,
    shown,
    text,
    user,
)
from e2e.seeing_models import make_seeing_model
from support.hostile_pictures import saved
from support.listeners import Listener, sized
from support.served import Served, forked

HOST = "127.0.0.1"
OTHER = saved("JPEG", (90, 40))
FREE = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def host() -> Iterator[Listener]:
    made = Listener(sized(FILE), HOST)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, host: Listener) -> Iterator[Served]:
    path = make_seeing_model(tmp_path_factory.mktemp("seeing"), "smolvlm")
    options = ("--model", str(path), "--served-model-name", NAME, *COMMON)
    with forked(*options, "--allowed-media-domains", HOST) as made:
        yield made


@pytest.fixture(scope="module")
def answers(server: Served) -> tuple[str, str]:
    """The texts of the answers about one picture, and about two in one message."""
    one, two = shown(data_url(FILE)), shown(data_url(OTHER))
    found = [chat(server, user(*some, text("what?"))) for some in ([one], [one, two])]
    first, second = (each["choices"][0]["message"]["content"] for each in found)
    return str(first), str(second)


@pytest.fixture(scope="module")
def openai_client(server: Served) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_completions(openai_client: Any, answers: tuple[str, str]) -> None:
    """Streamed and whole, with several pictures, turns, and a screenshot in a tool's result."""
    about = {"model": NAME, "max_tokens": 8, **FREE}
    create = openai_client.chat.completions.create
    parts = [shown(data_url(FILE), detail="auto"), shown(data_url(OTHER)), text("what?")]
    for some, wanted in (([parts[0], parts[2]], answers[0]), (parts, answers[1])):
        messages: list[Any] = [{"role": "user", "content": some}]
        assert create(messages=messages, **about).choices[0].message.content == wanted
        chunks = create(messages=messages, stream=True, **about)
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == wanted
    turns = [*messages, {"role": "assistant", "content": wanted}, *user(parts[1], text("and?"))]
    before = create(messages=messages, **about).usage.prompt_tokens
    usage = create(messages=turns, **about).usage
    assert usage.prompt_tokens > before + 4 and usage.prompt_tokens_details.cached_tokens > 0
    function = {"name": "look", "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}
    call["tool_calls"][0]["function"] = function  # type: ignore[index]
    results = [[text("seen"), parts[0]], [text("seen")]]
    counts = [
        create(
            messages=[*user(text("look")), call, {"role": "tool", "tool_call_id": "c", **content}],
            **about,
        ).usage.prompt_tokens
        for content in ({"content": each} for each in results)
    ]
    assert counts[0] > counts[1] + 4


def test_responses(openai_client: Any, host: Listener, answers: tuple[str, str]) -> None:
    """Streamed and whole, continued by their ids, and with screenshots."""
    about = {"model": NAME, "max_output_tokens": 8, **FREE}
    create = openai_client.responses.create
    ask = {"type": "input_text", "text": "what?"}
    one, other = (
        {"type": "input_image", "image_url": data_url(each), "detail": "auto"}
        for each in (FILE, OTHER)
    )
    by_url = {"type": "input_image", "image_url": host.url, "detail": "auto"}
    for parts, wanted in (
        ([one, ask], answers[0]), ([by_url, ask], answers[0]), ([one, other, ask], answers[1]),
    ):  # fmt: skip
        given: list[Any] = [{"role": "user", "content": parts}]
        first = create(input=given, **about)
        assert first.output_text == wanted
        events = create(input=given, stream=True, **about)
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(deltas) == wanted
    again = create(input="and?", previous_response_id=first.id, **about)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0
    screenshot = {"type": "computer_screenshot", "image_url": data_url(FILE)}
    action = {"type": "click", "x": 1, "y": 2, "button": "left"}
    clicked = {"type": "computer_call", "id": "i", "call_id": "c", "action": action}
    clicked |= {"status": "completed", "pending_safety_checks": []}
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}

    def tokens(call: dict[str, Any], kind: str, output: Any) -> int:
        items = [call, {"type": kind, "call_id": "c", "output": output}]
        return int(create(input=items, **about).usage.input_tokens)

    without = tokens(called, "function_call_output", "seen")
    seen = [{"type": "input_text", "text": "seen"}, one]
    assert tokens(called, "function_call_output", seen) > without + 4
    assert tokens(clicked, "computer_call_output", screenshot) > without + 4
    several = {**clicked, "actions": [action]}
    del several["action"]
    assert tokens(several, "computer_call_output", screenshot) > without + 4


def test_messages(server: Served, host: Listener, answers: tuple[str, str]) -> None:
    """Anthropic's client: base64 and URLs, streamed, counted, and in a tool's result."""
    anthropic = pytest.importorskip("anthropic")
    about = {"max_tokens": 8, "extra_body": {"temperature": 0, "ignore_eos": True}}
    one, other = (
        {"type": "base64", "media_type": kind, "data": base64.b64encode(content).decode()}
        for kind, content in (("image/png", FILE), ("image/jpeg", OTHER))
    )
    by_url = {"type": "url", "url": host.url}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for sources, wanted in (
            ([one], answers[0]), ([by_url], answers[0]), ([one, other], answers[1]),
        ):  # fmt: skip
            blocks = [*({"type": "image", "source": each} for each in sources), text("what?")]
            messages = [{"role": "user", "content": blocks}]
            answer = client.messages.create(model=NAME, messages=messages, **about)
            assert answer.content[0].text == wanted
            with client.messages.stream(model=NAME, messages=messages, **about) as stream:
                assert stream.get_final_text() == wanted
            counted = client.messages.count_tokens(model=NAME, messages=messages)
            usage = answer.usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        use = {"type": "tool_use", "id": "t", "name": "shot", "input": {}}
        counts = []
        for content in ([text("the screen"), {"type": "image", "source": one}], "the screen"):
            result = {"type": "tool_result", "tool_use_id": "t", "content": content}
            messages = [
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ]
            counts.append(client.messages.count_tokens(model=NAME, messages=messages).input_tokens)
        assert counts[0] > counts[1] + 4


def test_ollama(server: Served, answers: tuple[str, str]) -> None:
    ollama = pytest.importorskip("ollama")
    options = {"temperature": 0, "num_predict": 8}
    with ollama.Client(server.url) as client:
        for images, wanted in (([FILE], answers[0]), ([FILE, OTHER], answers[1])):
            message = {"role": "user", "content": "what?", "images": images}
            answer = client.chat(NAME, [message], options=options)
            assert answer.message.content and wanted.startswith(answer.message.content)
            parts = client.chat(NAME, [message], options=options, stream=True)
            assert "".join(each.message.content for each in parts) == answer.message.content
            other = client.generate(NAME, "what?", images=images, options=options)
            assert other.response == answer.message.content
            assert other.prompt_eval_count == answer.prompt_eval_count
        assert "vision" in client.show(NAME).capabilities
        with pytest.raises(ollama.ResponseError, match="from an answer about pictures"):
            client.generate(NAME, "and?", context=other.context, options=options)


@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain(server: Served, answers: tuple[str, str], uses_responses: bool) -> None:
    """In OpenAI's form and in its own, whole and streamed, and in a tool's result."""
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=NAME,
        temperature=0,
        max_retries=0,
        max_tokens=8,
        use_responses_api=uses_responses,
        extra_body={"ignore_eos": True},
    )
    own = [
        {"type": "image", "base64": base64.b64encode(content).decode(), "mime_type": kind}
        for kind, content in (("image/png", FILE), ("image/jpeg", OTHER))
    ]
    for pictures, wanted in (
        ([shown(data_url(FILE))], answers[0]), (own[:1], answers[0]), (own, answers[1]),
    ):  # fmt: skip
        messages = [HumanMessage([*pictures, text("what?")])]
        assert model.invoke(messages).text == wanted
        assert "".join(chunk.text for chunk in model.stream(messages)) == wanted
    call = AIMessage("", tool_calls=[{"id": "c", "name": "look", "args": {}}])
    sizes = [
        model.invoke([HumanMessage("look"), call, ToolMessage(content, tool_call_id="c")])
        .usage_metadata["input_tokens"]
        for content in ([text("seen"), own[0]], [text("seen")])
    ]  # fmt: skip
    assert sizes[0] > sizes[1] + 4
