"""Conversations as agents and other clients send them, over a running server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import HERMES
from support.served import Served, forked
from support.turn_templates import GEMMA_2, QWEN_35

import engine

MODEL = "box"
COMMON = ("--served-model-name", MODEL, "--num-threads", "1", "--num-kv-blocks", "1200")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "The weather in Rome"}]
BLOCK_SIZE = 16
BOX = Path(engine.__file__).parent / "assets" / "metronome-3m"


def write(root: Path, template: str) -> str:
    path = root / "template.jinja"
    path.write_text(template)
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The model in the box, with room for a long conversation."""
    root = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(BOX, root)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    template = write(root, HERMES)
    with forked(
        "--model", str(root), *COMMON, "--dtype", "float32", "--chat-template", template
    ) as made:
        yield made


@pytest.fixture(scope="module", params=[QWEN_35, GEMMA_2], ids=["qwen-3.5", "gemma-2"])
def strict(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    template = write(tmp_path_factory.mktemp("strict"), request.param)
    with forked(*COMMON, "--max-model-len", "768", "--chat-template", template) as made:
        yield made


def post(server: Served, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    sampling = {limit: 4, "temperature": 0} if path in (CHAT, MESSAGES, RESPONSES) else {}
    answer = server.ask(path, {"model": MODEL, **sampling, **asked})
    return answer.status, answer.json


TOOL = {
    "name": "run",
    "description": "Runs a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
RULES = "You are an agent that edits files and runs commands. Be careful and brief. " * 8


def turn(number: int) -> list[dict[str, Any]]:
    """A call, its result, and what a client adds to it."""
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "run", "input": {"command": "ls"}}
    result = {
        "type": "tool_result",
        "tool_use_id": f"toolu_{number}",
        "content": [{"type": "text", "text": f"a{number}.py b{number}.py"}],
    }
    reminder = {
        "type": "text",
        "text": f"<system-reminder>{number} files changed</system-reminder>",
    }
    said = [{"type": "text", "text": f"I look at part {number}."}, call]
    return [{"role": "assistant", "content": said}, {"role": "user", "content": [result, reminder]}]


def test_an_agents_conversation_is_found_cached(server: Served) -> None:
    """In the manner of Claude Code: 20 turns, tools, a billing line that changes each time."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Tidy up the repository"}]}
    ]
    before: list[int] = []
    shared, found = 0, 0
    for number in range(20):
        billing = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number * 7919:05x};"
        system = [
            {"type": "text", "text": billing},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
        ]
        asked = {"system": system, "messages": messages, "tools": [TOOL], "stream": False}
        status, answer = post(server, MESSAGES, asked)
        assert status == 200, answer
        usage = answer["usage"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        _, counted = post(server, MESSAGES + "/count_tokens", asked)
        assert counted["input_tokens"] == prompt
        if before:
            # All of the last prompt but the line that begins an answer is in this one.
            shared += before[-1]
            found += usage["cache_read_input_tokens"]
            assert usage["cache_read_input_tokens"] >= 0.95 * before[-1] - BLOCK_SIZE
        before.append(prompt)
        messages = [*messages, *turn(number)]
    assert found >= 0.95 * shared, (found, shared)


SYSTEM = {"role": "system", "content": "Available agent types: a, b"}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (MESSAGES, {"system": "main", "messages": [*ASK, SYSTEM, *ASK]}),
        (MESSAGES, {"system": "main", "messages": [SYSTEM]}),
        (MESSAGES, {"messages": [*ASK, *turn(1), SYSTEM], "tools": [TOOL]}),
        (MESSAGES, {"messages": [*ASK, *turn(1)]}),
        (MESSAGES, {"messages": [*ASK, *ASK, *turn(1), *ASK], "tools": [TOOL]}),
        (MESSAGES, {"messages": [{"role": "assistant", "content": []}, *ASK]}),
        (RESPONSES, {"instructions": "main", "input": [{"role": "developer", "content": "x"}]}),
        (RESPONSES, {"input": [*ASK, {"role": "developer", "content": "x"}, *ASK]}),
        (CHAT, {"messages": [SYSTEM, {"role": "developer", "content": "b"}, *ASK, SYSTEM]}),
        (CHAT, {"messages": [{"role": "assistant", "content": "Hello"}, *ASK, *ASK]}),
        ("/tokenize", {"messages": [*ASK, SYSTEM]}),
    ],
)
def test_strict_templates_take_any_conversation(
    strict: Served, path: str, asked: dict[str, Any]
) -> None:
    status, answer = post(strict, path, asked)
    assert status == 200, answer


def test_an_answer_that_is_begun_is_continued(server: Served) -> None:
    """By a client of messages, and by one of chat: only what is new is in the answer."""
    whole = post(server, CHAT, {"messages": ASK, "max_tokens": 24})[1]
    text = whole["choices"][0]["message"]["content"]
    begun = text[: len(text) // 2].rstrip()
    assert begun and text.startswith(begun)
    last = {"role": "assistant", "content": begun}
    chat = {
        "messages": [*ASK, last],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    status, answer = post(server, CHAT, {**chat, "max_tokens": 8})
    assert status == 200
    said = answer["choices"][0]["message"]["content"]
    assert not said.startswith(begun)
    status, message = post(server, MESSAGES, {"messages": [*ASK, last], "max_tokens": 8})
    assert status == 200
    assert "".join(block["text"] for block in message["content"]) == said
    ids = post(server, CHAT, {**chat, "return_token_ids": True})[1]["prompt_token_ids"]
    prompt = post(server, "/detokenize", {"tokens": ids})[1]["prompt"]
    assert prompt.endswith(f"<|im_start|>assistant\n{begun}")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"add_generation_prompt": True}, "both true"),
        (
            {
                "messages": [
                    *ASK,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            "tool calls",
        ),
    ],
)
def test_what_cannot_be_continued_is_named(
    server: Served, asked: dict[str, Any], said: str
) -> None:
    last = {"role": "assistant", "content": "I"}
    body = {"messages": [*ASK, last], "continue_final_message": True, **asked}
    status, answer = post(server, CHAT, body)
    assert status == 400 and said in answer["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/tokenize"])
def test_a_role_that_nobody_knows_is_named(server: Served, path: str) -> None:
    messages = [{"role": "narrator", "content": "x"}]
    body = {"input" if path == RESPONSES else "messages": messages}
    status, answer = post(server, path, body)
    message = answer["error"]["message"]
    assert status == 400 and "has a role 'narrator', must be one of: " in message
    assert "user" in message and "assistant" in message


def test_several_texts_without_chance_are_the_same(server: Served) -> None:
    status, answer = post(server, CHAT, {"messages": ASK, "n": 3, "max_tokens": 6})
    assert status == 200 and answer["usage"]["completion_tokens"] == 18
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
    asked = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "temperature": 0, "max_tokens": 6}
    status, answer = post(server, "/v1/completions", {**asked, "logprobs": 1, "echo": True})
    texts = [choice["text"] for choice in answer["choices"]]
    assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0][0] + texts[2][0] == "ab"
    streamed = events_of(server, CHAT, {"messages": ASK, "n": 3, "max_tokens": 6})
    parts: dict[int, str] = {}
    for event in streamed:
        for choice in event["choices"]:
            said = choice["delta"].get("content") or ""
            parts[choice["index"]] = parts.get(choice["index"], "") + said
    assert len(parts) == 3 and len(set(parts.values())) == 1
    status, answer = post(server, CHAT, {"messages": ASK, "n": 0})
    assert status == 400 and answer["error"]["param"] == "n"


def events_of(server: Served, path: str, asked: dict[str, Any]) -> list[Any]:
    """The data of a stream's events."""
    answer = server.ask(path, {"model": MODEL, "temperature": 0, "stream": True, **asked})
    lines = answer.body.decode().splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in found if each != "[DONE]"]
