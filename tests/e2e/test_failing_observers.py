"""A server of which all that watches fails: its clients see nothing of it, its operator does."""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.forked_runs import run_forked
from support.patience import WAIT_SECONDS
from support.served import Served, forked, free_port

from engine.assets import BOX_MODEL
from engine.cli.entry import run
from engine.cli.main import main

pytest.importorskip("opentelemetry.sdk")

OPTIONS = (
    "--served-model-name", "box", "--num-threads", "1", "--max-model-len", "512",
    "--num-kv-blocks", "400", "--dtype", "float32",
)  # fmt: skip
MODEL = ("--model", str(BOX_MODEL))
PROMPT = list(range(5, 300))
ADMIN = {"Authorization": "Bearer the-admin"}


def post(server: Served, path: str, body: object, **headers: str) -> tuple[int, str]:
    answer = server.ask(path, body, **headers)
    return answer.status, answer.body.decode()


def text_of(server: Served) -> str:
    body = {"model": "box", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    status, answer = post(server, "/v1/completions", {**body, "ignore_eos": True})
    assert status == 200, answer
    return str(json.loads(answer)["choices"][0]["text"])


def failures(server: Served) -> dict[str, float]:
    """By observer, as Prometheus reads them."""
    page = server.ask("/metrics").body.decode()
    line = re.compile(r'^metronome_observer_failures_total\{.*observer="([^"]+)"\} (\S+)$', re.M)
    return {name: float(num) for name, num in line.findall(page)}


@pytest.fixture(params=["down", pytest.param("silent", marks=pytest.mark.slow)])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A collector that is not there, or one that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)])
def is_profiled(request: pytest.FixtureRequest) -> bool:
    """A profile of two requests takes some ten seconds to be written."""
    return bool(request.param)


def lose_profile(server: Served, traces: Path) -> None:
    """Take one whose directory has become a file."""
    assert post(server, "/start_profile", {}, **ADMIN)[0] == 200
    text_of(server)
    shutil.rmtree(traces)
    traces.write_text("in its place")  # for root, too, no directory can be made here
    status, story = post(server, "/stop_profile", {}, **ADMIN)
    assert status == 400 and "torch_profiler_dir" in story


def test_all_observers_fail_and_requests_do_not(
    tmp_path: Path, endpoint: str, is_profiled: bool
) -> None:
    port, traces, log = free_port(), tmp_path / "traces", tmp_path / "log"
    options = (
        *("--step-log", "/dev/full", "--torch-profiler-dir", str(traces)),
        *("--otlp-traces-endpoint", endpoint, "--admin-api-key", "the-admin"),
        *("--enable-kv-events", "--kv-events-endpoint", f"tcp://127.0.0.1:{port}"),
    )
    variables = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"}
    with (
        forked(*OPTIONS, *options, log=log, **variables) as server,
        zmq.Context() as context,
        context.socket(zmq.SUB) as stalled,
    ):
        stalled.connect(f"tcp://127.0.0.1:{port}")
        stalled.subscribe(b"")
        first = text_of(server)
        if is_profiled:
            lose_profile(server, traces)
        until = time.monotonic() + WAIT_SECONDS
        wanted = {"step_log", "traces", *(["profiler"] if is_profiled else [])}
        while wanted - failures(server).keys():
            assert text_of(server) == first
            assert time.monotonic() < until, failures(server)
        for _ in range(5):
            assert text_of(server) == first
        assert failures(server)["step_log"] == 1.0
        assert server.end() == 0
    lines = [each for each in log.read_text().splitlines() if "has failed" in each]
    for name, cause in (("step_log", "No space left"), ("traces", endpoint)):
        (line,) = [each for each in lines if f"{name} has failed" in each]
        assert cause in line
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("option", "said"),
    [("--step-log", "cannot be written"), ("--torch-profiler-dir", "cannot be created")],
)
def test_what_is_known_at_the_start_is_an_error(
    option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "below")
    assert main(["generate", *MODEL, "--max-tokens", "2", option, place, "x"]) == 2
    done = capsys.readouterr()
    (line,) = done.err.splitlines()
    assert not done.out
    assert place in line and said in line


def generate_on_a_full_disk(options: tuple[str, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    sys.argv[1:] = ["generate", *options]
    sys.exit(run())


def test_a_command_keeps_its_answer_when_its_trace_is_lost(tmp_path: Path) -> None:
    """The disk is full at its end."""
    options = ("--max-tokens", "4", "--num-threads", "1", "--torch-profiler-dir", str(tmp_path))
    variables = {"METRONOME_LOG_LEVEL": "warning"}
    done = run_forked(generate_on_a_full_disk, (*MODEL, *options, "Hello"), **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Hello") and "4 output tokens" in done.stdout
    assert "metronome: no trace was written: " in done.stderr
    assert list(tmp_path.iterdir()) == []
