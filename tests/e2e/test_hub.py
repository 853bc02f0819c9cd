"""Programs that name a model, each in a process of its own, against a hub on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.fake_hub import FakeHub, files_of
from support.patience import WAIT_SECONDS

from engine import LLM, SamplingParams
from engine.assets import BOX_MODEL

TOKEN = "hf_aSecretThatMustNotShow"
PROMPT = "A list comprehension"
GENERATE = ("generate", PROMPT, "--max-tokens", "8", "--num-threads", "1")
WEIGHTS = "model.safetensors"

SCRIPT = """
from engine import LLM, SamplingParams

if __name__ == "__main__":
    with LLM({arguments}, num_threads=1, num_kv_blocks=64, max_model_len=256) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        print(llm.generate([{prompt!r}], params, use_tqdm=False)[0].outputs[0].text)
"""


class Done(NamedTuple):
    status: int
    output: str
    errors: str


class Programs:
    """Starts programs that use the hub, each with a cache of its own or a shared one."""

    def __init__(self, hub: FakeHub, directory: Path) -> None:
        self.hub = hub
        self.directory = directory
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, cache: str = "cache", **env: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **self.hub.env(self.directory / cache), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(started)
        return started

    def finish(self, started: subprocess.Popen[str]) -> Done:
        output, errors = started.communicate()
        return Done(started.returncode, output, errors)

    def metronome(self, *args: str, cache: str = "cache", **env: str) -> Done:
        return self.finish(self.start("-m", "engine.cli.main", *args, cache=cache, **env))

    def script(self, arguments: str, cache: str = "cache", **env: str) -> Done:
        path = self.directory / "script.py"
        path.write_text(SCRIPT.format(arguments=arguments, prompt=PROMPT))
        return self.finish(self.start(str(path), cache=cache, **env))

    def close(self) -> None:
        for each in self._started:
            if each.poll() is None:
                each.kill()
            each.communicate()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub().running() as running:
        running.add("org/box", {**files_of(BOX_MODEL), "pytorch_model.bin": b"a pickle"})
        yield running


@pytest.fixture
def programs(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    running = Programs(hub, tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def text() -> str:
    """What the model says when it is given as a directory, as programs print it."""
    with LLM(str(BOX_MODEL), num_threads=1, num_kv_blocks=64, max_model_len=256) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text + "\n"


def test_a_model_by_name_says_what_its_directory_does_and_again_without_a_network(
    hub: FakeHub, programs: Programs, text: str
) -> None:
    first = programs.script("'org/box'")
    assert first.output == text, first.errors
    (line,) = (line for line in first.errors.splitlines() if "fetching" in line)
    assert "org/box: fetching 5 files" in line
    assert sorted(set(hub.fetched())) == sorted(set(files_of(BOX_MODEL)) - {"README.md"})
    hub.asked.clear()
    again = programs.script("'org/box'", HF_HUB_OFFLINE="1")
    assert (again.output, hub.asked) == (text, []), again.errors


def test_a_token_opens_a_gated_model_for_a_core_in_a_process_and_is_never_seen(
    hub: FakeHub, programs: Programs, text: str
) -> None:
    hub.repos["org/box"].readers = {TOKEN}
    done = programs.script(f"'org/box', hf_token={TOKEN!r}, multiprocess=True, log_level='debug'")
    assert done.output == text, done.errors
    assert hub.fetched(WEIGHTS) == [WEIGHTS]  # by one of the two
    assert TOKEN not in done.errors


@pytest.mark.slow
def test_two_programs_at_once_fetch_once(hub: FakeHub, programs: Programs) -> None:
    hub.repos["org/box"].delays[WEIGHTS] = 4.0  # for the other to come meanwhile
    arguments = ("-m", "engine.cli.main", *GENERATE, "--model", "org/box")
    both = [programs.start(*arguments) for _ in range(2)]
    first, second = (programs.finish(each) for each in both)
    assert (first.status, second.status) == (0, 0), first.errors + second.errors
    assert first.output.splitlines()[0] == second.output.splitlines()[0]
    assert hub.fetched(WEIGHTS) == [WEIGHTS]


def test_the_machine_of_a_core_fetches_weights_and_a_front_end_the_tokenizer(
    hub: FakeHub, programs: Programs, text: str
) -> None:
    core = programs.start(
        *("-m", "engine.cli.main", "core", "--model", "org/box", "--num-threads", "1"),
        cache="core",
    )
    assert core.stdout is not None
    line = core.stdout.readline()
    assert line.startswith("core address: "), core.communicate()
    address = line.removeprefix("core address: ").strip()
    assert sorted(hub.fetched()) == ["config.json", "generation_config.json", WEIGHTS]
    attached = ("generate", PROMPT, "--max-tokens", "8", "--core-address", address)
    hub.asked.clear()
    nameless = programs.metronome(*attached, cache="front")
    assert nameless.status == 2 and hub.asked == []
    assert "runs org/box, but this engine has no model for the tokenizer: set" in nameless.errors
    named = programs.metronome(*attached, "--model", "org/box", cache="front")
    assert named.output.startswith(PROMPT + text.rstrip("\n")), named.errors
    assert WEIGHTS not in hub.fetched() and "tokenizer.json" in hub.fetched()
    core.send_signal(signal.SIGTERM)
    assert core.wait() == 0


@pytest.mark.usefixtures("can_interrupt")
def test_an_interrupt_ends_a_download_at_once(hub: FakeHub, programs: Programs) -> None:
    stalled = hub.repos["org/box"].stalls[WEIGHTS] = threading.Event()
    running = programs.start("-m", "engine.cli.main", *GENERATE, "--model", "org/box")
    assert stalled.wait(WAIT_SECONDS)
    running.send_signal(signal.SIGINT)
    status, output, errors = programs.finish(running)
    assert errors == "metronome: interrupted\n"
    assert (status, output) == (130, "")
    cache = programs.directory / "cache"
    assert not list(cache.rglob("*.incomplete"))


def test_mistakes_are_one_line(hub: FakeHub, programs: Programs) -> None:
    hub.add("org/gated", files_of(BOX_MODEL)).readers = {"hf_of_another"}
    for model, message in (
        ("org/none", "model 'org/none' is neither a directory in"),
        ("org/gated", f"model 'org/gated' is gated, and the account of .* at {hub.url}/org/gated"),
    ):
        done = programs.metronome(*GENERATE, "--model", model, "--hf-token", TOKEN)
        (line,) = done.errors.splitlines()
        assert done.status == 2 and re.search(message, line), line
        assert line.startswith("metronome: error: ") and TOKEN not in line
