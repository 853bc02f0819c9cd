"""``metronome core`` as a user runs it, and clients that use it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.simulate import make_request

from engine import LLM, ConfigError, EngineDeadError, SamplingParams
from engine.assets import BOX_MODEL
from engine.cli.main import main
from engine.ipc.address import address_of
from engine.rpc.zmq_client import EngineCoreClient

PROMPTS = ["A list comprehension", "def f(x):", "Once upon a time", "The"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def core() -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "engine.cli.main", "core", "--num-threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("core address: ipc://"), line
        yield running, line.removeprefix("core address: ").strip()
        if running.poll() is None:
            running.kill()


def texts(llm: LLM) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_several_programs_use_one_core_and_the_texts_are_those_of_a_core_of_ones_own(
    core: tuple[subprocess.Popen[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = core
    with (
        LLM(BOX_MODEL, num_threads=1) as own,
        LLM(core_address=address) as one,
        LLM(core_address=address) as two,
    ):
        wanted = texts(own)
        assert texts(one) == wanted and texts(two) == wanted
        long = one.generate(PROMPTS[:1], SamplingParams(max_tokens=3, n=2), use_tqdm=False)
        assert [len(c.token_ids) for c in long[0].outputs] == [3, 3]
    assert main(["generate", "--max-tokens", "12", "--core-address", address, PROMPTS[0]]) == 0
    assert capsys.readouterr().out.startswith(PROMPTS[0] + wanted[0])


def test_sigterm_drains_and_leaves_nothing(core: tuple[subprocess.Popen[str], str]) -> None:
    running, address = core
    client = EngineCoreClient(address_of(address, None))
    client.add(make_request("a", [5, 6, 7], 60))
    running.send_signal(signal.SIGTERM)
    num_tokens, finished = 0, []
    while not finished:
        for batch in client.step():
            num_tokens += len(batch.token_ids)
            finished += batch.finished
    assert num_tokens == 60 and finished[0].reason == "length"
    with pytest.raises(EngineDeadError, match="shut down"):
        for _ in range(100):
            client.step()
    client.shutdown()
    assert running.wait() == 0
    assert not Path(address.removeprefix("ipc://")).parent.exists()
    with pytest.raises(ConfigError, match="there is no core at"):
        LLM(core_address=address)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "ipc:///tmp/x"], "--listen is 'ipc:///tmp/x', must start with tcp://"),
        (["--listen", "tcp://127.0.0.1:5555"], "needs a shared secret of at least 16 characters"),
        (["--listen", "tcp://127.0.0.1"], "must be tcp://HOST:PORT"),
        (["--multiprocess"], "--multiprocess is for clients of a core"),
    ],
)
def test_addresses_that_cannot_work_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["core", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
