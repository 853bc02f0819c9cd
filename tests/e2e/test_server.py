"""`metronome serve` and the client that most programs use, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.patience import SOON_SECONDS
from support.served import Served, served

openai = pytest.importorskip("openai")

MODEL = "box"
COMMON = ("--num-threads", "1", "--max-model-len", "256", "--num-kv-blocks", "400")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--served-model-name", MODEL, *COMMON, "--dtype", "float32") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), dict(error.headers)


def test_models(client: Any) -> None:
    (about,) = client.models.list().data
    assert about.id == MODEL and about.max_model_len == 256
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="must be one of: box"):
        client.models.retrieve("other")


def test_a_streamed_text_is_the_whole_one(client: Any) -> None:
    asked = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens == 24 and whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert len(chunks) > 5 and {chunk.id for chunk in chunks} == {chunks[0].id}
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 24 and not chunks[-1].choices


def test_several_prompts_and_several_texts(client: Any) -> None:
    asked = {"model": MODEL, "prompt": ["a", "def f"], "n": 3, "max_tokens": 8, "seed": 5}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len({choice.text for choice in whole.choices}) > 2
    texts = [""] * 6
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    by_ids = client.completions.create(
        model=MODEL, prompt=[[5, 6, 7], [8]], max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert [len(choice.token_ids) for choice in by_ids.choices] == [2, 2]
    assert by_ids.usage.prompt_tokens == 4


def test_a_conversation(client: Any) -> None:
    messages = [
        {"role": "system", "content": "You are short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}],
        },
    ]
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 16}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert "".join(e.token for e in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 2 and entry.logprob <= 0
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content


def test_a_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["tea", "milk"]},
            "cups": {"type": "integer", "maximum": 9},
        },
        "required": ["kind", "cups"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "drink", "schema": schema}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A drink"}],
        response_format=form,
        max_tokens=200,
        seed=1,
    )
    assert json.loads(answer.choices[0].message.content)["kind"] in ("tea", "milk")
    with pytest.raises(openai.BadRequestError, match="divisibleBy"):
        client.completions.create(
            model=MODEL,
            prompt="x",
            extra_body={"structured_outputs": {"json": {"type": "integer", "divisibleBy": 3}}},
        )


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("completions", {"prompt": "x", "temprature": 1}, "temprature is not supported"),
        ("completions", {"prompt": "x", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a " * 400}, "256"),
        ("chat/completions", {"messages": []}, "messages is []"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(
    server: Served, path: str, fields: dict[str, Any], said: str, stream: bool
) -> None:
    body = json.dumps({"model": MODEL, "stream": stream, **fields}).encode()
    status, answer, _ = post(f"{server.url}/v1/{path}", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert said in answer["error"]["message"]


def test_what_is_no_request(server: Served) -> None:
    url = f"{server.url}/v1/completions"
    assert post(url, b"{")[0] == 400
    assert post(url, b'"x"')[0] == 400
    assert post(url, b"[" * 100_000)[0] == 400
    assert post(url, b'{"model": "box", "prompt": "\xff"}')[0] == 400
    assert post(f"{server.url}/v1/other", b"{}")[0] == 404
    assert post(f"{server.url}/v1/models", b"{}")[0] == 405
    assert post(url, json.dumps({"model": "x", "prompt": "x"}).encode())[0] == 404


def test_who_leaves_is_not_served_on(server: Served) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            asked = {
                "model": MODEL,
                "prompt": "x",
                "max_tokens": 250,
                "extra_body": {"ignore_eos": True},
            }
            streams = [await client.completions.create(**asked, stream=True) for _ in range(20)]
            for stream in streams:
                await anext(aiter(stream))
                await stream.close()
            whole = [asyncio.create_task(client.completions.create(**asked)) for _ in range(4)]
            await asyncio.sleep(0.05)
            for task in whole:
                task.cancel()
            await asyncio.gather(*whole, return_exceptions=True)

    asyncio.run(leave())
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    began = time.monotonic()
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
    assert time.monotonic() - began < SOON_SECONDS


def test_who_breaks_a_connection_costs_others_nothing(server: Served, client: Any) -> None:
    """A second request behind one that is answered, and wrong; or a client that leaves."""
    asked = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 120, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    calm = client.completions.create(**asked).choices[0].text
    body = json.dumps(
        {"model": MODEL, "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    first = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    wrong = f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode()
    for second in (wrong, first):
        with ThreadPoolExecutor(5) as pool, contextlib.ExitStack() as stack:
            broken = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                for _ in range(2)
            ]
            for connection in broken:
                connection.sendall(first)
                assert b"200 OK" in connection.recv(4096)
            whole = [pool.submit(client.completions.create, **asked) for _ in range(2)]
            streams = [pool.submit(client.completions.create, stream=True, **asked)]
            time.sleep(0.05)
            for connection in broken:
                connection.sendall(second)
                connection.close()
            assert [each.result().choices[0].text for each in whole] == [calm, calm]
            for stream in streams:
                assert "".join(c.choices[0].text for c in stream.result()) == calm
