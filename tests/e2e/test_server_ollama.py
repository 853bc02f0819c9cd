"""Ollama's API by its own client, over running servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.sentence_models import save_sentences
from support.chat_templates import HERMES
from support.patience import WAIT_SECONDS
from support.served import Served, forked

ollama = pytest.importorskip("ollama")
pydantic = pytest.importorskip("pydantic")

LENGTH = 512
COMMON = ("--num-threads", "1", "--max-model-len", str(LENGTH), "--num-kv-blocks", "200")
KEYS = ("--api-key", "secret", "--admin-api-key", "boss")
ASK = [{"role": "user", "content": "The weather in Rome"}]
GREEDY = {"temperature": 0, "num_predict": 6}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "In a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template: Path = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(HERMES)
    names = ("--served-model-name", "box", "--served-model-name", "small:3m")
    with forked(*names, *COMMON, *KEYS, "--chat-template", str(template)) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with ollama.Client(server.url, headers={"Authorization": "Bearer secret"}) as made:
        yield made


def post(server: Served, path: str, body: object) -> Any:
    return server.ask(path, body, Authorization="Bearer secret")


# -- text


def test_a_conversation_whole_and_streamed(client: Any) -> None:
    """With and without the tag. Thinking is off, so that all text is content."""
    wanted = {"messages": ASK, "options": GREEDY, "think": False}
    whole = client.chat("box", **wanted)
    assert whole.model == "box" and whole.message.role == "assistant" and whole.message.content
    assert whole.done and whole.done_reason == "length" and whole.eval_count == 6
    assert whole.prompt_eval_count > 10 and whole.total_duration >= whole.eval_duration > 0
    assert whole.prompt_eval_duration > 0 and whole.created_at.endswith("Z")
    *chunks, last = client.chat("box:latest", stream=True, **wanted)
    assert "".join(chunk.message.content for chunk in chunks) == whole.message.content
    assert not any(chunk.done for chunk in chunks) and {c.model for c in chunks} == {"box:latest"}
    assert last.done and last.message.content == "" and last.eval_count == 6


def test_streams_are_lines_and_the_default(server: Served) -> None:
    wanted = {"model": "box", "messages": ASK, "options": GREEDY}
    answer = post(server, "/api/chat", wanted)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    lines = answer.body.splitlines()
    assert len(lines) > 1 and json.loads(lines[-1])["done"]
    assert post(server, "/api/chat", {**wanted, "stream": False}).json["done"]


def test_thinking_is_apart_from_the_answer(client: Any, server: Served) -> None:
    """The small model does not think by itself: its answer is begun."""
    wanted = [*ASK, {"role": "assistant", "content": "<think>\nhm"}]
    for stream in (False, True):
        given = client.chat("box", wanted, stream=stream, options=GREEDY, think=True)
        parts = list(given) if stream else [given]
        assert "".join(part.message.thinking or "" for part in parts)
        assert not "".join(part.message.content for part in parts)
    with pytest.raises(ollama.ResponseError, match=r"think is 'hgh'.*did you mean 'high'"):
        client.chat("box", ASK, think="hgh")


def test_earlier_thinking_goes_back(client: Any) -> None:
    def num(**fields: str) -> int:
        turns = [*ASK, {"role": "assistant", "content": "Fine", **fields}, *ASK]
        return int(client.chat("box", turns, options=GREEDY).prompt_eval_count)

    assert num(thinking="The user asks for the weather") > num() + 5


def test_calls_and_results_of_tools_are_read(client: Any) -> None:
    for stream in (False, True):
        given = client.chat("box", ASK, tools=[WEATHER], stream=stream, options={"seed": 3})
        assert (list(given)[-1] if stream else given).done
    used = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    turns = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [used]},
        {"role": "tool", "tool_name": "weather", "content": "sunny in Rome today"},
    ]
    read = client.chat("box", turns, tools=[WEATHER], options=GREEDY)
    assert read.prompt_eval_count > client.chat("box", ASK, options=GREEDY).prompt_eval_count + 20


def test_text_by_a_schema(client: Any) -> None:
    class Weather(pydantic.BaseModel):
        city: str = pydantic.Field(pattern="^(Rome|Paris)$")
        days: int = pydantic.Field(ge=1, le=9)

    wanted = {"format": Weather.model_json_schema(), "options": {"seed": 1}, "think": False}
    text = client.chat("box", ASK, **wanted).message.content
    assert Weather.model_validate_json(text).city in ("Rome", "Paris")
    text = client.generate("box", "The weather", **wanted).response
    assert Weather.model_validate_json(text)
    text = client.generate("box", "x", raw=True, format={"enum": ["yes"]}).response
    assert json.loads(text) == "yes"


def test_a_prompt_with_and_without_template(client: Any, server: Served) -> None:
    raw = client.generate("box", "The weather in Rome", raw=True, options=GREEDY)
    prefixed = client.generate("box", "The weather in Rome", system="Short", options=GREEDY)
    assert raw.context is None and raw.prompt_eval_count < prefixed.prompt_eval_count
    wanted = {"model": "box", "prompt": "The weather in Rome", "max_tokens": 6, "temperature": 0}
    same = post(server, "/v1/completions", wanted).json["choices"][0]["text"]
    assert raw.response == same
    *chunks, last = client.generate(
        "box", "The weather in Rome", raw=True, options=GREEDY, stream=True
    )
    assert "".join(chunk.response for chunk in chunks) == same and last.done


def test_a_context_goes_on(client: Any) -> None:
    first = client.generate("box", "My name is Ada", options=GREEDY)
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    second = client.generate("box", "Who am I?", context=first.context, options=GREEDY)
    alone = client.generate("box", "Who am I?", options=GREEDY)
    assert second.context[: len(first.context)] == first.context
    grown = second.prompt_eval_count - alone.prompt_eval_count - len(first.context)
    assert grown in (0, -1)  # without a second begin-of-text token
    with pytest.raises(ollama.ResponseError, match="context"):
        client.generate("box", "x", context=[10**6])


def test_log_probabilities(client: Any) -> None:
    wanted = {"options": GREEDY, "logprobs": True, "top_logprobs": 2, "think": False}
    whole = client.chat("box", ASK, **wanted)
    streamed = list(client.chat("box", ASK, stream=True, **wanted))
    assert len(whole.logprobs) == 6 and len(whole.logprobs[0].top_logprobs) == 2
    together = [each for chunk in streamed for each in chunk.logprobs or []]
    assert together == whole.logprobs
    assert len(client.generate("box", "x", **wanted).logprobs) == 6


def test_the_oldest_messages_leave_a_full_context(client: Any) -> None:
    """The system message and the last one stay."""
    system = {"role": "system", "content": "Answer in verse"}
    last = {"role": "user", "content": "And then?"}
    old = [
        {"role": role, "content": f"{number} " * 40}
        for number in range(30)
        for role in ("user", "assistant")
    ]
    options = {**GREEDY, "num_ctx": 120}
    short = client.chat("box", [system, last], options=options)
    assert short.prompt_eval_count < 110
    cut = client.chat("box", [system, *old, last], options=options)
    assert short.prompt_eval_count <= cut.prompt_eval_count < 120
    room = client.chat("box", [system, *old, last], options=GREEDY)
    assert 119 < room.prompt_eval_count < LENGTH
    one = client.chat("box", [{"role": "user", "content": "x " * 5000}], options=GREEDY)
    assert one.prompt_eval_count == LENGTH - 1 and one.eval_count == 1


@pytest.mark.parametrize("num_ctx", [64, None])
def test_a_prompt_that_may_not_be_cut(server: Served, num_ctx: int | None) -> None:
    long = {"role": "user", "content": "x " * 5000}
    wanted = {"model": "box", "truncate": False, "options": {"num_ctx": num_ctx}}
    for path, more in (
        ("/api/chat", {"messages": [long]}),
        ("/api/generate", {"prompt": long["content"]}),
        ("/api/generate", {"prompt": long["content"], "raw": True}),
    ):
        answer = post(server, path, {**wanted, **more})
        assert answer.status == 400, answer.body
        assert "exceeds the context length" in answer.json["error"]
        assert str((num_ctx or LENGTH) - 1) in answer.json["error"]


def test_nothing_to_generate_loads_the_model(server: Served) -> None:
    for path in ("/api/chat", "/api/generate"):
        for keep_alive, reason in ((None, "load"), ("5m", "load"), (0, "unload")):
            answer = post(server, path, {"model": "box", "keep_alive": keep_alive})
            assert answer.json["done_reason"] == reason and answer.json["done"]


# -- about the model


def test_lists_and_descriptions(client: Any) -> None:
    listed = client.list().models
    assert [each.model for each in listed] == ["box:latest", "small:3m"]
    assert listed[0].size > 6e6 and len(listed[0].digest) == 64
    assert listed[0].details.format == "safetensors" and listed[0].details.family == "llama"
    assert listed[0].details.parameter_size == "3.15M"
    (first, second) = client.ps().models
    assert first.model == "box:latest" and first.context_length == LENGTH
    assert first.expires_at.year > 2300 and second.digest == first.digest
    for name in ("box", "box:latest", "small:3m"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.modelinfo["llama.context_length"] == LENGTH
        assert shown.modelinfo["general.architecture"] == "llama"
        assert shown.template == HERMES and shown.details.quantization_level == "BF16"


def test_names_that_are_not_served(client: Any) -> None:
    for name in ("bx", "box:3b", "small", "small:latest"):
        for use in (client.show, lambda name: client.chat(name, ASK)):
            with pytest.raises(ollama.ResponseError, match="must be one of: box") as refused:
                use(name)
            assert refused.value.status_code == 404


def test_other_apis_know_the_names_of_lists(server: Served) -> None:
    """Some clients list models here and chat there."""
    body = {"model": "box:latest", "messages": ASK, "max_tokens": 3}
    assert post(server, "/v1/chat/completions", body).json["model"] == "box"
    assert post(server, "/api/show", {"name": "box:latest"}).status == 200


def test_models_are_not_managed(client: Any, server: Served) -> None:
    for use in (
        lambda: client.pull("box"),
        lambda: client.push("box"),
        lambda: client.create("mine", from_="box"),
        lambda: client.copy("box", "mine"),
        lambda: client.delete("box"),
    ):
        with pytest.raises(
            ollama.ResponseError, match=r"/api/\w+ is not supported.*metronome serve"
        ):
            use()
    assert post(server, "/api/blobs/sha256:0", b"").status == 400


# -- the server


def test_greetings_need_no_key_and_all_else_does(server: Served) -> None:
    assert server.ask("/").body == b"Ollama is running"
    assert server.ask("/", method="HEAD").status == 200
    assert server.ask("/api/version").json["version"]
    assert server.ask("/", Accept="text/html,*/*").body != b"Ollama is running"
    for path in ("/api/tags", "/api/ps", "/api/chat", "/api/show"):
        answer = server.ask(path, None if path in ("/api/tags", "/api/ps") else {"model": "box"})
        assert answer.status == 401 and "key" in answer.json["error"]
    assert post(server, "/api/chat", {"model": "box", "messages": 5}).status == 400


def test_errors_are_texts(server: Served) -> None:
    for path, body, status, word in (
        ("/api/chat", {"messages": ASK}, 400, "model is missing"),
        (
            "/api/chat",
            {"model": "box", "messages": ASK, "options": {"top_p": 7}},
            400,
            "options.top_p",
        ),
        ("/api/chat", b"{", 400, "not valid JSON"),
        ("/api/generate", {"model": "box", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/nothing", {}, 404, "no route"),
        ("/api/embed", {"model": "box", "input": "x"}, 400, "returns no vectors"),
    ):
        answer = post(server, path, body)
        assert answer.status == status and answer.json.keys() == {"error"}
        assert word in answer.json["error"], answer.json
    answer = server.ask("/api/chat", None, Authorization="Bearer secret")
    assert answer.status == 405 and answer.json.keys() == {"error"}
    stops = {"model": "box", "messages": ASK, "options": {"stop": ["x" * 3000]}}
    assert "options.stop" in post(server, "/api/chat", stops).json["error"]


def test_requests_are_counted(server: Served, client: Any) -> None:
    def counted() -> str:
        return server.ask("/metrics", Authorization="Bearer secret").body.decode()

    client.chat("box", ASK, options=GREEDY)
    assert any("/api/chat" in line and '"200"' in line for line in counted().splitlines())


def test_a_stream_that_is_aborted_ends_with_an_error() -> None:
    """By a server that ends while the small model writes 2,000 tokens."""
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 10000}
    begun = threading.Event()
    failed: list[str] = []
    with forked("--num-threads", "1", "--drain-timeout", "0.01") as server:

        def read() -> None:
            with ollama.Client(server.url) as client:
                try:
                    for _ in client.chat("box", ASK, stream=True, format=schema):
                        begun.set()
                except ollama.ResponseError as error:
                    failed.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(WAIT_SECONDS)
        assert server.end() == 0
        reader.join(WAIT_SECONDS)
    assert len(failed) == 1 and "shutting down: send it again" in failed[0]


# -- vectors


def test_embeddings(tmp_path: Path) -> None:
    """Equal to those of OpenAI's API, which equal sentence-transformers'."""
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    parts = [Pooling(32, "mean"), Normalize()]
    root = save_sentences(tmp_path, "Bert", parts, transformer={"max_seq_length": 40})
    options = ("--served-model-name", "small", "--num-threads", "1", "--dtype", "float32")
    with forked(str(root), *options) as server, ollama.Client(server.url) as client:
        texts = ["the cat sits on a mat", "dog"]
        found = client.embed("small", texts)
        body = {"model": "small", "input": texts}
        expected = [each["embedding"] for each in server.ask("/v1/embeddings", body).json["data"]]
        np.testing.assert_allclose(found.embeddings, expected, atol=1e-6)
        assert found.prompt_eval_count > 4 and found.total_duration > 0
        old = client.embeddings("small:latest", texts[0]).embedding
        np.testing.assert_allclose(old, expected[0], atol=1e-6)
        assert client.embed("small", "").embeddings == [] == client.embed("small", []).embeddings
        long = "dog " * 500
        np.testing.assert_allclose(np.linalg.norm(client.embed("small", long).embeddings), 1, 1e-5)
        for given in (texts, ""):  # the document gives ranges for every API
            with pytest.raises(ollama.ResponseError, match=r"options\.temperature is 9"):
                client.embed("small", given, options={"temperature": 9})
        with pytest.raises(ollama.ResponseError, match="dimensions is 16"):
            client.embed("small", texts, dimensions=16)
        with pytest.raises(ollama.ResponseError, match="exceeds the context length: a text has 50"):
            client.embed("small", long, truncate=False)
        wrong = server.ask("/api/embed", {"model": "small", "input": 5})
        assert wrong.status == 400 and "input" in wrong.json["error"]
        assert client.show("small").capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="generates no text"):
            client.chat("small", ASK)
