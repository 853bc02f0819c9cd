"""Errors and offsets as clients of a running server read them, in each of the three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import made_tokenizers as made
from support.served import Served, forked

from engine.config.model import ModelConfig
from engine.text.tokenizer import Tokenizer, load_tokenizer

MODEL, EOS = "tiny", 2
TEXT, CHAT, RESPONSE, MESSAGE = "completions", "chat/completions", "responses", "messages"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of the kind of Llama 2, with random weights."""
    tokenizer = made.metaspace()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "torch_dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 1, "eos_token_id": EOS,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "chat_template": TEMPLATE,
    }  # fmt: skip
    files = {"config.json": config, "tokenizer_config.json": about}
    return made.save(tmp_path_factory.mktemp("model"), tokenizer, files)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(ModelConfig(model=str(directory)))


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Served]:
    options = ("--load-format", "dummy", "--num-threads", "1", "--num-kv-blocks", "400")
    with forked(str(directory), "--served-model-name", MODEL, *options) as made_one:
        yield made_one


def ask(server: Served, path: str, **fields: Any) -> tuple[int, bytes]:
    """A good request but for these fields."""
    word = [{"role": "user", "content": "x"}]
    good: dict[str, dict[str, Any]] = {
        TEXT: {"prompt": "x"},
        CHAT: {"messages": word},
        RESPONSE: {"input": "x"},
        MESSAGE: {"messages": word, "max_tokens": 4},
    }
    answer = server.ask(f"/v1/{path}", {"model": MODEL, **good[path], **fields})
    return answer.status, answer.body


def refused(server: Served, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    status, body = ask(server, path, **fields)
    return status, json.loads(body)["error"]


def prompt(path: str, text: str) -> dict[str, Any]:
    words = [{"role": "user", "content": text}]
    return {TEXT: {"prompt": text}, RESPONSE: {"input": text}}.get(path, {"messages": words})


# -- errors


@pytest.mark.parametrize(
    ("path", "param"), [(TEXT, "prompt"), (CHAT, "messages"), (RESPONSE, "input"), (MESSAGE, None)]
)
def test_clients_know_a_prompt_that_is_too_long(
    server: Served, path: str, param: str | None
) -> None:
    """By the words that litellm (in lower case) and LangChain look for."""
    status, error = refused(server, path, **prompt(path, "a b " * 400))
    assert status == 400 and error["type"] == "invalid_request_error"
    message = error["message"]
    assert "this model's maximum context length is 256 tokens" in message.lower()
    assert "prompt is too long" in message and "255 maximum" in message
    assert "--max-model-len" in message
    if param is not None:
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


SCHEMA = {"type": "strng"}
FORMS: dict[str, tuple[dict[str, Any], str | None]] = {
    TEXT: ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    CHAT: (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format",
    ),
    RESPONSE: (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "text.format",
    ),
    MESSAGE: ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
def test_a_form_that_cannot_be_compiled_blames_its_field(
    server: Served, path: str, stream: bool
) -> None:
    fields, param = FORMS[path]
    status, error = refused(server, path, stream=stream, **fields)
    assert status == 400 and "strng" in error["message"]
    if param is not None:
        assert (error["code"], error["param"]) == ("invalid_grammar", param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_could_not_complete(server: Served, stream: bool) -> None:
    nothing = {"allowed_token_ids": [EOS], "min_tokens": 2, "max_tokens": 4}
    status, error = refused(server, TEXT, stream=stream, **nothing)
    assert (status, error["code"]) == (400, "no_token_is_allowed")
    status, error = refused(server, TEXT, stream=stream, timeout=1e-9)
    assert (status, error["code"]) == (408, "deadline_exceeded")


# -- offsets


def columns(server: Served, **fields: Any) -> dict[int, dict[str, Any]]:
    """Text, tokens and offsets of each choice, put together as a client does."""
    status, body = ask(server, TEXT, logprobs=1, return_token_ids=True, **fields)
    assert status == 200, body
    if fields.get("stream"):
        events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: {")]
    else:
        events = [body.decode()]
    found: dict[int, dict[str, Any]] = {}
    for choice in (each for event in events for each in json.loads(event)["choices"]):
        told = found.setdefault(choice["index"], {"text": "", "tokens": [], "offsets": []})
        told["text"] += choice["text"]
        told["tokens"] += choice["logprobs"]["tokens"]
        told["offsets"] += choice["logprobs"]["text_offset"]
        assert all(offset <= len(told["text"]) for offset in told["offsets"])
    return found


PROMPTS = {"text": "Hello world.", "parts of characters": "Hello 日", "none": ""}


@pytest.mark.parametrize(
    ("name", "by_ids", "has_echo"),
    [
        *(("text", False, True), ("text", True, False)),
        *(("parts of characters", True, True), ("none", False, False)),
    ],
)
def test_offsets_count_what_is_in_the_text(
    server: Served, tokenizer: Tokenizer, name: str, by_ids: bool, has_echo: bool
) -> None:
    given: Any = PROMPTS[name]
    if by_ids:
        given = tokenizer.encode(given)
    asked = {
        "prompt": given, "echo": has_echo, "max_tokens": 40, "n": 2, "temperature": 1, "seed": 3,
        "ignore_eos": True, "skip_special_tokens": not by_ids,
    }  # fmt: skip
    for stream in (False, True):
        told = columns(server, **asked, stream=stream)
        assert len(told) == 2
        for choice in told.values():
            check(choice)
            assert len(choice["offsets"]) >= 40
            if has_echo and not by_ids:
                assert choice["text"].startswith(PROMPTS[name])


def check(choice: dict[str, Any]) -> None:
    """Each token is where its offset says."""
    text, offsets = choice["text"], choice["offsets"]
    assert offsets == sorted(offsets) and max(offsets) <= len(text)
    for token, begin in zip(choice["tokens"], offsets, strict=True):
        if token.startswith("bytes:") or token in ("<s>", "</s>", "<unk>"):
            continue
        # A byte of its own next to bytes that are no text is shown as they are.
        words = (token, token.lstrip(" "), *(["\ufffd"] if len(token) == 1 else []))
        is_cut = token.lstrip(" ").startswith(text[begin:])  # by a stop string
        assert text[begin:].startswith(words) or is_cut, (token, begin, text)


@pytest.mark.parametrize(("stop", "stream"), [("ck b", False), ("ox jumps", True), (" dog.", True)])
def test_offsets_end_where_a_stop_string_cuts(server: Served, stop: str, stream: bool) -> None:
    said = "The quick brown fox jumps over the lazy dog."
    form = {"structured_outputs": {"choice": [said]}, "max_tokens": 90, "temperature": 0}
    told = columns(server, prompt="Hello", stop=[stop], stream=stream, **form)[0]
    assert told["text"] == said[: said.index(stop)]
    check(told)


def test_a_prompt_that_was_cut_is_echoed_with_its_end(server: Served) -> None:
    said = "The quick brown fox jumps over the lazy dog."
    asked = {"prompt": said, "truncate_prompt_tokens": 5, "echo": True, "max_tokens": 4}
    told = columns(server, **asked, temperature=0)[0]
    assert told["text"].startswith(said) and told["offsets"][0] > 10
    check(told)
