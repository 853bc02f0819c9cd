"""What an operator sees: the log, the exit status and what clients get, by what happens."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.live_core import is_running
from support.patience import WAIT_SECONDS
from support.processes import is_spawned, tree_of
from support.served import Served

OPTIONS = ("--num-threads", "1", "--max-model-len", "1024")


class Watched:
    """A server, and what it has written."""

    def __init__(self, server: Served, log: Path) -> None:
        self.server = server
        self.process = server.process
        self._log = log

    def lines(self, word: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if word in line]

    def awaited_lines(self, word: str, num: int = 1) -> list[str]:
        """The lines with this word, once there are ``num``: a server that runs may write them after
        the change that they report."""
        until(lambda: len(self.lines(word)) >= num)
        return self.lines(word)

    def cores(self) -> list[int]:
        tree = tree_of(self.process.pid)[1:]
        return [pid for pid in tree if is_spawned(pid)]

    def ask(self, path: str, body: Any = None) -> tuple[int, dict[str, Any], Any]:
        """Status, answer and headers."""
        answer = self.server.ask(path, body)
        return answer.status, answer.json, answer.headers

    def complete(self) -> tuple[int, dict[str, Any], Any]:
        return self.ask("/v1/completions", {"model": "box", "prompt": "a", "max_tokens": 3})


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def watched(tmp_path: Path, *options: str, **variables: str) -> Iterator[Watched]:
    """A server at a free port, which its log names."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        server = Served.start(0, *OPTIONS, *options, log=file, **variables)
    it = Watched(server, log)
    try:
        until(lambda: it.lines("is served at") or server.process.poll() is not None)
        (line,) = it.lines("is served at")
        assert it.lines("requests are scheduled by policy ")
        found = re.search(r"box is served at (http://127\.0\.0\.1:(\d+))$", line)
        assert found is not None and found[2] != "0", line
        server.url, server.port = found[1], int(found[2])
        yield it
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def open_stream(it: Watched) -> Iterator[Any]:
    """A stream that has begun."""
    body = {
        "model": "box", "prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(
        f"{it.server.url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as stream:
        assert stream.readline().startswith(b"data: ")
        yield stream


DEADLY = """
from engine.sched.policy import Policy

class Deadly(Policy):
    def rank(self, req, view):
        return (req.arrival,)

    def on_add(self, req, view):
        raise SystemExit("enough")  # no fault that a core survives
"""


def test_a_core_in_the_process_of_the_server_dies(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    options = ("--no-multiprocess", "--scheduling-policy", "deadly.Deadly")
    with watched(tmp_path, *options, PYTHONPATH=str(tmp_path)) as it:
        status, told, _ = it.complete()
        assert (status, told["error"]["code"]) == (503, "engine_dead")
        assert it.process.wait(WAIT_SECONDS) == 1
        (line,) = it.lines("CRITICAL")
        assert line.endswith("SystemExit: enough")


def cores_in_metrics(it: Watched) -> list[float]:
    """Cores, living ones and deaths."""
    page = it.server.ask("/metrics").body.decode()
    names = ("cores", "cores_alive", "core_deaths_total")
    found = [re.search(rf"^metronome_{name}{{.*}} (.+)$", page, re.MULTILINE) for name in names]
    return [float(each[1]) for each in found if each is not None]


def test_one_of_two_cores_dies_and_then_the_other(tmp_path: Path) -> None:
    with watched(tmp_path, "--data-parallel-size", "2") as it:
        first, second = it.cores()
        pools = [line.partition(" engine.core: ")[2] for line in it.lines("KV cache:")]
        assert sorted(line[:7] for line in pools) == ["core 0:", "core 1:"]
        assert cores_in_metrics(it) == [2, 2, 0]
        os.kill(first, signal.SIGSEGV)
        until(lambda: it.ask("/health")[1].get("cores_alive") == 1)
        assert cores_in_metrics(it) == [2, 1, 1]
        (line,) = it.awaited_lines("ERROR")
        assert "was killed by SIGSEGV" in line and "1 of 2 cores go on" in line
        with open_stream(it) as stream:
            os.kill(second, signal.SIGKILL)
            tail = stream.read()
        assert b'"code":"engine_dead"' in tail and tail.endswith(b"data: [DONE]\n\n")
        assert it.process.wait(WAIT_SECONDS) == 1
        (line,) = it.lines("CRITICAL")
        assert "was killed by SIGKILL" in line
        (line,) = it.lines("engine.requests")
        assert "status=200" in line and "error=engine_dead" in line


@pytest.mark.parametrize("num_cores", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dead_cores_are_started_again(tmp_path: Path, num_cores: int) -> None:
    options = ("--on-core-death", "restart", "--data-parallel-size", str(num_cores))
    with watched(tmp_path, *options) as it:
        before = it.cores()
        assert len(before) == num_cores
        for core in before:
            os.kill(core, signal.SIGKILL)
        refused = []

        def is_back() -> bool:
            status, told, headers = it.complete()
            if status == 503:
                refused.append((told["error"]["code"], int(headers["Retry-After"]) >= 1))
            alive = it.ask("/health")[1].get("cores_alive")
            return status == 200 and alive == num_cores and not set(it.cores()) & set(before)

        until(is_back)
        assert set(refused) <= {("core_restarting", True), ("core_died", True)}
        deaths = it.awaited_lines("was killed by SIGKILL", num_cores)
        assert len(deaths) == num_cores
        assert all("it is started again (1 of 5 times)" in line for line in deaths)
        assert len(it.awaited_lines("serves again, started in", num_cores)) == num_cores
        metrics = it.server.ask("/metrics").body
        assert b'metronome_engine_up{model_name="box"} 1.0' in metrics
        assert cores_in_metrics(it) == [num_cores, num_cores, num_cores]
        tree = tree_of(it.process.pid)
        assert it.server.end() == 0
        until(lambda: not any(map(is_running, tree)))


def test_names_and_addresses_are_taken_as_they_are_reported(tmp_path: Path) -> None:
    """A socket file, and the path of the model as its name."""
    from engine.assets import BOX_MODEL

    path = tmp_path / "socket"
    log = tmp_path / "log"
    with log.open("wb") as file:
        server = Served.start(0, *OPTIONS, "--uds", str(path), log=file)
    it = Watched(server, log)
    try:
        until(lambda: it.lines("is served at") or server.process.poll() is not None)
        assert it.lines(f"box is served at http+unix:{path}")
        second = subprocess.run(
            [*server.process.args, "--uds", str(path)],
            capture_output=True,
            text=True,  # type: ignore[misc,list-item]
        )
        assert second.returncode == 2
        assert "which another server uses" in second.stderr.splitlines()[-1]
        body = json.dumps({"model": str(BOX_MODEL), "prompt": "a", "max_tokens": 3}).encode()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
            kind = "Content-Type: application/json\r\nConnection: close\r\n\r\n"
            client.sendall((head + kind).encode() + body)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b'"model":"box"' in answer
        assert server.end() == 0
        assert not path.exists()
    finally:
        server.process.kill()
        server.process.wait()
