"""Tools of agents over a running server: custom ones, namespaces, and those a server would run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import HERMES
from support.openai_events import events_of
from support.served import Served, forked
from support.turn_templates import GEMMA_2, QWEN_35

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

MODEL = "box"
COMMON = ("--served-model-name", MODEL, "--num-threads", "1", "--num-kv-blocks", "400")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "Edit it"}]
LEFT_OUT = "X-Left-Out-Tools"
PATCH = """
start: "*** Begin" LF change~1..6 "*** End"
change: ("+" | "-") /[a-z" ]{1,4}/ LF
%import common.LF
"""
WANTED = re.compile(r'\*\*\* Begin\n([+-][a-z" ]{1,4}\n){1,6}\*\*\* End')
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
}
FUNCTION = {
    "type": "function",
    "name": "run",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"dry": {"type": "boolean"}},
        "required": ["dry"],
        "additionalProperties": False,
    },
}
NAMESPACE = {"type": "namespace", "name": "mcp__git", "description": "d", "tools": [FUNCTION]}
SEARCH = {"type": "web_search", "external_web_access": False}


@pytest.fixture(
    scope="module",
    params=[HERMES, QWEN_35, GEMMA_2],
    ids=["JSON", "between tags", "a template without tools"],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with started(tmp_path_factory.mktemp("template"), request.param) as made:
        yield made


def started(root: Path, template: str, *options: str, **how: Any) -> Any:
    path = root / "template.jinja"
    path.write_text(template)
    return forked(*COMMON, "--max-model-len", "1024", "--chat-template", str(path), *options, **how)


def post(server: Served, path: str, asked: dict[str, Any]) -> tuple[int, Any, Any]:
    """Status, answer and headers."""
    answer = server.ask(path, {"model": MODEL, "seed": 1, **asked})
    return answer.status, answer.json, answer.headers


FORCED = {
    "tools": [CUSTOM],
    "tool_choice": {"type": "custom", "name": "patch"},
    "chat_template_kwargs": {"enable_thinking": False},
}


def test_the_input_of_a_custom_tool_follows_its_grammar(server: Served) -> None:
    status, answer, _ = post(server, RESPONSES, {"input": ASK, **FORCED, "max_output_tokens": 300})
    assert status == 200 and answer["status"] == "completed", answer
    (item,) = answer["output"]
    assert item["type"] == "custom_tool_call" and item["name"] == "patch"
    assert WANTED.fullmatch(item["input"]), item
    items = [
        *ASK,
        item,
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"},
    ]
    asked = {"input": items, "tools": [CUSTOM], "tool_choice": "none", "max_output_tokens": 4}
    assert post(server, RESPONSES, asked)[0] == 200
    following = {"previous_response_id": answer["id"], "input": items[2:], "max_output_tokens": 4}
    assert post(server, RESPONSES, following)[0] == 200


def test_a_streamed_input_is_the_whole_one(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body = {k: v for k, v in FORCED.items() if k != "chat_template_kwargs"}
    extra = {"chat_template_kwargs": FORCED["chat_template_kwargs"], "seed": 1}
    asked = {"model": MODEL, "input": ASK, **body, "max_output_tokens": 300, "extra_body": extra}
    whole = client.responses.create(**asked).output[0]
    events = list(client.responses.create(**asked, stream=True))
    pieces = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert "".join(pieces) == done.input == whole.input and len(pieces) > 1
    assert WANTED.fullmatch(whole.input)
    begun, ended = (
        next(e.item for e in events if e.type == f"response.output_item.{when}")
        for when in ("added", "done")
    )
    assert begun.type == ended.type == "custom_tool_call" and begun.input == ""
    assert ended.input == whole.input and begun.id == ended.id == done.item_id
    assert events[-1].response.output[0].input == whole.input


def test_a_custom_tool_of_chat_completions(server: Served) -> None:
    about = {k: v for k, v in CUSTOM.items() if k not in ("type", "format")}
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-c]{3}\\n"}}
    tool = {"type": "custom", "custom": {**about, "format": form}}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    asked = {**FORCED, "tools": [tool], "tool_choice": choice, "messages": ASK}
    status, answer, _ = post(server, CHAT, asked)
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "custom" and re.fullmatch("[a-c]{3}\n", call["custom"]["input"])
    body = {"model": MODEL, "seed": 1, "stream": True, **asked}
    chunks = [chunk for _, chunk in events_of(server.url + CHAT, body)]
    deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or []]
    assert [each["type"] for each in pieces if "type" in each] == ["custom"]
    assert "".join(each["custom"]["input"] for each in pieces) == call["custom"]["input"]
    message = answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    after = {"messages": [*ASK, message, result], "tools": [tool], "max_tokens": 4}
    assert post(server, CHAT, after)[0] == 200


def test_a_tool_of_a_namespace_is_called_by_its_name(server: Served) -> None:
    asked = {**FORCED, "tools": [NAMESPACE, SEARCH], "tool_choice": "required"}
    status, answer, headers = post(
        server, RESPONSES, {"input": ASK, **asked, "parallel_tool_calls": False}
    )
    assert status == 200 and headers[LEFT_OUT] == "web_search"
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "run", "mcp__git")
    assert json.loads(item["arguments"])["dry"] in (True, False)
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
    asked = {"input": [*ASK, item, output], "tools": [NAMESPACE], "max_output_tokens": 4}
    assert post(server, RESPONSES, asked)[0] == 200
    chosen = {"type": "function", "name": "run", "namespace": "mcp__git"}
    assert post(server, RESPONSES, {"input": ASK, **FORCED, "tools": [NAMESPACE, CUSTOM],
                                    "tool_choice": chosen})[0] == 200  # fmt: skip


CLAUDE_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
WITH_SERVER_TOOLS = [
    (RESPONSES, {"input": "hi", "tools": [SEARCH, {"type": "image_generation"}]},
     "web_search, image_generation"),
    (MESSAGES, {"messages": ASK, "tools": [CLAUDE_SEARCH]}, "web_search_20250305"),
    (CHAT, {"messages": ASK, "web_search_options": {}}, "web_search"),
]  # fmt: skip
HISTORY = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    {"type": "text", "text": "It is so."},
]


def test_tools_that_a_server_would_run_are_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(tmp_path, HERMES, log=log) as server:
        for path, asked, kinds in WITH_SERVER_TOOLS:
            limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 4}
            for stream in (False, True):
                answer = server.ask(path, {"model": MODEL, "stream": stream, **limit, **asked})
                assert answer.status == 200 and answer.headers[LEFT_OUT] == kinds
        said = [{"role": "assistant", "content": HISTORY}]
        asked = {"messages": [*ASK, *said, *ASK], "tools": [CLAUDE_SEARCH], "max_tokens": 4}
        assert post(server, MESSAGES, asked)[0] == 200
        for choice in ({"type": "web_search"}, "required"):
            asked = {"input": "hi", "tools": [SEARCH], "tool_choice": choice}
            status, answer, _ = post(server, RESPONSES, asked)
            assert status == 400 and answer["error"]["param"] == "tool_choice"
        assert LEFT_OUT not in post(server, RESPONSES, {"input": "hi", "max_output_tokens": 4})[2]
    assert "left out tools that a server would have to run: web_search" in log.read_text()


def test_tools_that_a_server_would_run_can_be_refused(tmp_path: Path) -> None:
    with started(tmp_path, HERMES, "--refuse-server-tools") as server:
        for path, asked, kinds in WITH_SERVER_TOOLS:
            limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 4}
            status, answer, _ = post(server, path, {**asked, **limit, "seed": None})
            assert status == 400 and kinds in answer["error"]["message"]
            assert "--refuse-server-tools" in answer["error"]["message"]
