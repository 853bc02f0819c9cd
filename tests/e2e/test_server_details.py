"""What clients of `metronome serve` ask for beside text: echoes, log-probabilities, ids, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.served import Served, forked

openai = pytest.importorskip("openai")

MODEL = "box"
PROMPT = "def add(a, b):"
COMMON = ("--num-threads", "1", "--max-model-len", "512", "--num-kv-blocks", "400")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with forked("--served-model-name", MODEL, *COMMON, "--dtype", "float32") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: Served, path: str, **fields: object) -> tuple[int, Any]:
    answer = server.ask(path, fields)
    return answer.status, answer.json


def test_an_echo_is_the_prompt_and_the_text(server: Served, client: Any) -> None:
    asked = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(**asked, prompt=PROMPT, logprobs=2)
    echo = client.completions.create(**asked, prompt=PROMPT, logprobs=2, echo=True)
    text = PROMPT + plain.choices[0].text
    assert echo.choices[0].text == text and echo.usage == plain.usage
    told = echo.choices[0].logprobs
    assert "".join(told.tokens) == text
    for start, token in zip(told.text_offset, told.tokens, strict=True):
        assert text[start:].startswith(token)
    assert told.text_offset[0] == 0 and told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None and len(told.tokens) == echo.usage.total_tokens
    ours, own = told.token_logprobs[-8:], plain.choices[0].logprobs
    assert ours == pytest.approx(own.token_logprobs, abs=1e-4)
    columns = (told.tokens, told.token_logprobs, told.top_logprobs)
    for token, chosen, top in list(zip(*columns, strict=True))[1:]:
        assert top[token] == chosen and 2 <= len(top) <= 3
    chunks = list(
        client.completions.create(**asked, prompt=PROMPT, logprobs=2, echo=True, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [offset for part in parts for offset in part.text_offset] == told.text_offset
    ids = post(server, "/tokenize", prompt=PROMPT)[1]["tokens"]
    by_ids = client.completions.create(**asked, prompt=ids, echo=True)
    assert by_ids.choices[0].text == text and by_ids.choices[0].logprobs is None


def test_an_echo_alone_scores_a_prompt(client: Any) -> None:
    """Evaluations need the log-probabilities of each prompt, and no text."""
    prompts = [PROMPT, "x = [1, 2]", PROMPT]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=0, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == prompts
    assert answer.usage.completion_tokens == 0
    first, other, again = (choice.logprobs.token_logprobs for choice in answer.choices)
    assert first[1:] == pytest.approx(again[1:], abs=1e-3)
    assert [each is None for each in first] == [True] + [False] * (len(first) - 1)
    assert len(other) == len(answer.choices[1].logprobs.tokens)
    assert all(choice.finish_reason == "length" for choice in answer.choices)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=0)


def test_log_probabilities_of_prompts(server: Served) -> None:
    asked = {"model": MODEL, "max_tokens": 1, "prompt_logprobs": 1, "return_token_ids": True}
    status, answer = post(server, "/v1/completions", prompt=PROMPT, n=2, **asked)
    assert status == 200
    for choice in answer["choices"]:
        ids, told = choice["prompt_token_ids"], choice["prompt_logprobs"]
        assert len(ids) == len(told) == answer["usage"]["prompt_tokens"] and told[0] is None
        assert len(choice["token_ids"]) == 1
        for token, at in zip(ids[1:], told[1:], strict=True):
            assert at[str(token)]["logprob"] <= 0 and at[str(token)]["rank"] >= 1
            assert isinstance(at[str(token)]["decoded_token"], str)
    status, answer = post(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **asked
    )
    assert len(answer["prompt_token_ids"]) == len(answer["prompt_logprobs"])
    status, answer = post(server, "/v1/completions", prompt="x", stream=True, **asked)
    assert status == 400 and answer["error"]["param"] == "prompt_logprobs"


def test_ids_of_the_prompt_come_with_the_first_chunk(client: Any) -> None:
    extra = {"return_token_ids": True}
    asked = {"model": MODEL, "max_tokens": 4, "stream": True, "extra_body": extra}
    chunks = list(client.completions.create(**asked, prompt=[5, 6, 7]))
    told = [getattr(chunk.choices[0], "prompt_token_ids", None) for chunk in chunks]
    assert told[0] == [5, 6, 7] and not any(told[1:])
    messages = [{"role": "user", "content": "x"}]
    chunks = list(client.chat.completions.create(**asked, messages=messages))
    told = [getattr(chunk, "prompt_token_ids", None) for chunk in chunks]
    assert told[0] and not any(told[1:])


def test_parts_of_characters_have_their_bytes(server: Served, client: Any) -> None:
    """The model is made to write a character of several tokens."""
    text = "\u65e5"
    ids = post(server, "/tokenize", prompt=text)[1]["tokens"]
    assert len(ids) > 1
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=1,
        max_tokens=8,
        extra_body={"structured_outputs": {"choice": [text]}},
    )
    (choice,) = answer.choices
    assert choice.message.content == text
    told = [entry.bytes for entry in choice.logprobs.content]
    assert b"".join(map(bytes, told)).startswith(text.encode()) and len(told) > 1
    for entry in choice.logprobs.content:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    echo = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0)
    names = echo.choices[0].logprobs.tokens
    assert all(name.startswith("bytes:\\x") for name in names)
    assert bytes.fromhex("".join(name[6:].replace("\\x", "") for name in names)) == text.encode()


def test_tokens_and_back(server: Served) -> None:
    text = "x = 'caf\u00e9 \u65e5\u672c <|im_start|>'\n"
    status, told = post(server, "/tokenize", model=MODEL, prompt=text, return_token_strs=True)
    assert status == 200 and told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 512
    assert post(server, "/detokenize", tokens=told["tokens"]) == (200, {"prompt": text})
    messages = [{"role": "user", "content": "Say hi"}]
    chat = post(server, "/tokenize", messages=messages)[1]
    rendered = post(server, "/detokenize", tokens=chat["tokens"])[1]["prompt"]
    assert "Say hi" in rendered and rendered.endswith("<|im_start|>assistant\n")
    bare = post(server, "/tokenize", messages=messages, add_generation_prompt=False)[1]
    assert bare["tokens"] == chat["tokens"][: bare["count"]] and bare["count"] < chat["count"]
    usage = post(
        server, "/v1/chat/completions", model=MODEL, messages=messages, max_tokens=1
    )[1]["usage"]  # fmt: skip
    assert usage["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/tokenize", {}, "prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt or messages"),
        ("/tokenize", {"prompt": "x" * 5_000_000}, "4194304"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ x }}"}, "chat_template"),
        ("/tokenize", {"messages": [{"content": "x"}]}, "role"),
        ("/tokenize", {"prompt": "x", "token_strs": True}, "did you mean 'return_token_strs'?"),
        ("/tokenize", {"messages": [], "chat_template_kwargs": {"tools": []}}, "tools"),
        ("/detokenize", {"tokens": [-1]}, "-1"),
        ("/detokenize", {"tokens": [10**9]}, "1000000000"),
        ("/detokenize", {"tokens": [2**70]}, str(2**70)),
        ("/detokenize", {"tokens": [1] * 300_000}, "262144"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_is_no_text_or_tokens_is_named(
    server: Served, path: str, fields: dict[str, Any], said: str
) -> None:
    status, answer = post(server, path, **fields)
    assert status == 400 and said in answer["error"]["message"]
    assert post(server, path, model="other", **fields)[0] in (400, 404)


def test_tokenising_holds_up_nobody(server: Served) -> None:
    """Other requests are answered while long texts are tokenised."""
    text = "def f(x):\n    return 'abc' * 17\n" * 25_000
    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(post, server, "/tokenize", prompt=text) for _ in range(3)]
        num = 0
        while not all(each.done() for each in long):
            assert server.ask("/health").status == 200
            num += 1
        assert all(each.result()[0] == 200 for each in long)
    assert num > 3


def test_hints_reach_the_policy_or_are_named(server: Served) -> None:
    good = {"user": "ann", "deadline": 5.0, "queue_timeout": 30, "expected_tokens": 12}
    hints = {"hints": {"ttft": 0.5, "program": "p"}}
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert post(server, "/v1/completions", **asked, **good, **hints)[0] == 200
    for field, value in (
        ("deadline", 0), ("deadline", -1), ("expected_tokens", 0), ("queue_timeout", -1),
        ("hints", [1]), ("hints", {"a": 10**30}),
    ):  # fmt: skip
        status, answer = post(server, "/v1/completions", **asked, **{field: value})
        assert status == 400 and field in answer["error"]["message"], (field, value, answer)


@pytest.mark.parametrize("path", ["images/generations", "audio/transcriptions"])
def test_what_is_not_there_yet_says_so(server: Served, path: str) -> None:
    status, answer = post(server, f"/v1/{path}", model=MODEL, input="x")
    assert status == 400 and answer["error"]["code"] == "not_supported"
    assert "not supported yet" in answer["error"]["message"]


def test_a_base_url_without_v1_is_noticed(server: Served) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="use '/v1/chat/completions', with /v1 in base"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    status, answer = post(server, "/chat/nothing")
    assert status == 404 and answer["error"]["message"].endswith(": see /openapi.json")


def test_a_model_that_generates_embeds_nothing(server: Served, client: Any) -> None:
    for path in ("/v1/embeddings", "/rerank", "/v2/rerank", "/score", "/classify", "/pooling"):
        status, answer = post(server, path, model=MODEL, input="x")
        assert status == 400 and answer["error"]["code"] == "not_supported"
        assert f"{path} is not supported: {MODEL} generates text" in answer["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="start a server with a model for embeddings"):
        client.embeddings.create(model=MODEL, input="x")


KIND = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
TAG = {"structures": [{"begin": "<a>", "schema": KIND, "end": "</a>"}], "triggers": ["<a"]}
CALLED = {"name": "keep", "parameters": KIND, "strict": True}
NAMED = {"type": "json_schema", "name": "kind", "schema": KIND}
NEVER: dict[str, tuple[str, dict[str, Any], str]] = {
    "response_format": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": NAMED}},
        "response_format",
    ),
    "structured_outputs": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"json": KIND}},
        "structured_outputs",
    ),
    "tags": (
        "/v1/chat/completions",
        {**CHAT, "structured_outputs": {"structural_tag": TAG}},
        "structured_outputs",
    ),
    "a strict tool": (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": CALLED}]},
        "tools",
    ),
    "a response": ("/v1/responses", {"input": "x", "text": {"format": NAMED}}, "text.format"),
    "a tool of a response": (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", **CALLED}]},
        "tools",
    ),
    "no text matches": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"regex": "[^\\s\\S]"}},
        "structured_outputs",
    ),
    "no sentence ends": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"grammar": "start: start start\n"}},
        "structured_outputs",
    ),
}


def test_a_mistake_in_a_schema_is_named_with_its_place(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "strng"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, answer = post(server, "/v1/chat/completions", model=MODEL, response_format=form, **CHAT)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_grammar", "response_format")
    assert "the schema's properties.a.type is 'strng', must be one of: null" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NEVER)
def test_what_no_text_could_satisfy_is_a_mistake_of_the_request(
    server: Served, name: str, stream: bool
) -> None:
    """Clients send again what fails with 500, and it would fail again."""
    path, asked, param = NEVER[name]
    status, body = post(server, path, model=MODEL, stream=stream, **asked)
    assert status == 400 and body["error"]["param"] == param, body


TWO = {"properties": {"a": {"const": 1}}, "not": {"maxProperties": 1}, "required": ["a"]}
PAIR = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, **TWO}
CALL = {"name": "keep", "parameters": PAIR, "strict": True}
OBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "structured_outputs": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"json": PAIR}},
    ),
    "response_format": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": PAIR}}},
    ),
    "a strict tool": (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": CALL}], "tool_choice": "required"},
    ),
    "a response": (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": PAIR}}},
    ),
    "a message": (
        "/v1/messages",
        {**CHAT, "max_tokens": 9, "output_format": {"type": "json_schema", "schema": PAIR}},
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_objects_may_have_is_said_by_the_request(server: Served, name: str) -> None:
    """Two properties, of which the schema names one: no closed object has them."""
    path, asked = OBJECTS[name]
    asked = {"model": MODEL, **asked}
    status, body = post(server, path, **asked, additional_properties="open")
    assert status == 200, body
    status, body = post(server, path, **asked, additional_properties="closed")
    assert status == 400 and "contradicts itself" in body["error"]["message"], body
    status, body = post(server, path, **asked, property_order="sideways")
    assert status == 400 and "property_order" in body["error"]["message"], body


def test_whitespace_by_its_pattern(server: Served) -> None:
    for pattern, text in (("[ ]{2}", '{  "a"  :  [  1  ]  }'), ("", '{"a":[1]}')):
        form = {"json": {"const": {"a": [1]}}, "whitespace_pattern": pattern}
        asked = {"model": MODEL, "structured_outputs": form, **CHAT}
        _, body = post(server, "/v1/chat/completions", **asked)
        assert body["choices"][0]["message"]["content"] == text
