"""Sampling values that a model's makers recommend hold wherever a request leaves them out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.served import Served, forked

from engine import LLM, SamplingParams
from engine.assets import BOX_MODEL
from engine.cli.main import main

RECOMMENDED = {"temperature": 0.9, "top_k": 1, "repetition_penalty": 1.1, "max_new_tokens": 24}
VALUES = {"temperature": 0.9, "top_k": 1, "repetition_penalty": 1.1, "max_tokens": 24}
OPTIONS = ("--num-threads", "1", "--max-num-seqs", "8", "--num-kv-blocks", "200")
PROMPT = "def add(a, b):"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
APIS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 24},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {**CHAT, "max_tokens": 24},
}
OWN = {"temperature": 1.8, "top_k": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recommended")
    (path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def server(directory: Path, log: Path) -> Iterator[Served]:
    with forked(*OPTIONS, "--generation-config", str(directory), log=log) as made:
        yield made


def ask(server: Served, path: str, **fields: Any) -> dict[str, Any]:
    body = None if path == "/v1/models" else {"model": "box", **fields}
    found: dict[str, Any] = server.ask(path, body).json
    return found


def text_of(answer: dict[str, Any]) -> str:
    """What was written, whichever API says it."""
    return json.dumps(
        [
            answer.get("content"),
            [each.get("text") or each.get("message") for each in answer.get("choices", [])],
            [each.get("content") for each in answer.get("output", [])],
        ]
    )


@pytest.mark.parametrize("path", APIS)
def test_they_fill_what_a_request_leaves_out_and_its_own_win(server: Served, path: str) -> None:
    fields = {**APIS[path], "ignore_eos": True}
    texts = {text_of(ask(server, path, **fields)) for _ in range(3)}
    assert len(texts) == 1, "with a top_k of 1 nothing is drawn"
    own = {text_of(ask(server, path, **fields, **OWN)) for _ in range(6)}
    assert len(own) > 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_the_length_is_theirs_unless_a_request_has_one(server: Served, path: str) -> None:
    def num_tokens(**fields: Any) -> int:
        asked = {name: value for name, value in APIS[path].items() if name != "max_tokens"}
        usage = ask(server, path, **asked, ignore_eos=True, **fields)["usage"]
        return int(usage.get("completion_tokens") or usage["output_tokens"])

    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert num_tokens() == (16 if path == "/v1/completions" else 24)  # OpenAI's own default is 16
    assert num_tokens(**{limit: 40}) == 40


def test_what_holds_is_reported(server: Served, log: Path, directory: Path) -> None:
    (about,) = ask(server, "/v1/models")["data"]
    assert about["default_sampling_params"] == VALUES
    told = ask(server, "/v1/responses", input="x", max_output_tokens=1)
    assert (told["temperature"], told["top_p"]) == (0.9, 1.0)
    (line,) = (line for line in log.read_text().splitlines() if "sampling parameters" in line)
    assert str(directory) in line and "temperature 0.9, top_k 1" in line


@pytest.mark.parametrize("where", [{}, {"multiprocess": True}], ids=["here", "core elsewhere"])
def test_a_library_call_without_params_takes_them_and_params_are_complete(
    where: dict[str, Any], directory: Path
) -> None:
    options = {"num_threads": 1, "num_kv_blocks": 64, "max_model_len": 256, **where}
    with LLM(BOX_MODEL, generation_config=directory, **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**VALUES)
        ask = {"use_tqdm": False}
        first, second = llm.generate([PROMPT, PROMPT], **ask)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        longest = SamplingParams(ignore_eos=True, max_tokens=30)
        outputs = llm.generate([PROMPT] * 8, longest, **ask)
        assert {len(each.outputs[0].token_ids) for each in outputs} == {30}
        assert len({tuple(each.outputs[0].token_ids) for each in outputs}) > 1
        default = llm.get_default_sampling_params()
        default.max_tokens = 3
        assert len(llm.generate(PROMPT, default, **ask)[0].outputs[0].token_ids) <= 3
        assert llm.get_default_sampling_params().max_tokens == 24


def test_commands_take_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", PROMPT, "--num-threads", "1", "--model", str(BOX_MODEL)]
    override = ["--override-generation-config", json.dumps({"max_new_tokens": 5})]

    def num_tokens(*options: str) -> str:
        assert main([*command, "--ignore-eos", *override, *options]) == 0
        return capsys.readouterr().out.splitlines()[-1].split(", ")[1]

    assert num_tokens() == "5 output tokens"
    assert num_tokens("--max-tokens", "7") == "7 output tokens"
