"""``metronome top`` as a user runs it, beside a core and a server that are at work."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from support.patience import WAIT_SECONDS
from support.served import Served, forked

from engine import SamplingParams
from engine.cli.main import main
from engine.cli.readings import ServerSource
from engine.errors import ConfigError, EngineDeadError
from engine.ipc.address import address_of
from engine.messages.requests import AddRequest
from engine.rpc.zmq_client import EngineCoreClient

METRONOME = [sys.executable, "-m", "engine.cli.main"]
NUM_REQUESTS, NUM_TOKENS = 12, 40


def start_core() -> tuple[subprocess.Popen[str], str]:
    """The model in the box in four seats, and its address."""
    command = [*METRONOME, "core", "--num-threads", "1", "--max-num-seqs", "4"]
    core = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert core.stdout is not None
    line = core.stdout.readline()
    assert line.startswith("core address: ipc://"), line
    return core, line.removeprefix("core address: ").strip()


@pytest.fixture(scope="module")
def core() -> Iterator[tuple[subprocess.Popen[str], str]]:
    running, address = start_core()
    with running:
        yield running, address
        if running.poll() is None:
            running.kill()


def top(*args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*METRONOME, "top", *args], capture_output=True, text=True, **how)


class Work:
    """A dozen requests of a client of a core, and another for each that ends, until it is left.

    It is entered when the first ones that had to wait for a seat have their last tokens.
    """

    def __init__(self, address: str) -> None:
        self._client = EngineCoreClient(address_of(address, None))
        self._goes_on = True
        self._num_asked = 0
        self.num_ended = 0
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Work:
        self._thread.start()
        while self.num_ended < NUM_REQUESTS and self._thread.is_alive():
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on = False
        self._thread.join()
        self._client.shutdown()

    def _run(self) -> None:
        client = self._client
        while self._goes_on:
            while client.num_unfinished() < NUM_REQUESTS:
                client.add(self._request())
            self.num_ended += sum(len(batch.finished) for batch in client.step())

    def _request(self) -> AddRequest:
        self._num_asked += 1
        prompt = [*range(5, 45), 5 + self._num_asked % 100]
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        name, now = f"{self._client.id_prefix}{self._num_asked}", time.monotonic()
        return AddRequest(name, prompt, params, 0, now, NUM_TOKENS)


def row(table: str, name: str) -> list[str]:
    """The cells of a line of the table, behind its name."""
    (line,) = (line for line in table.splitlines() if line.startswith(name + "  "))
    return line.removeprefix(name).split()


@pytest.mark.slow
def test_a_core_at_work_is_read_beside_it(core: tuple[subprocess.Popen[str], str]) -> None:
    _, address = core
    with Work(address):
        text = top("--connect", address, "--once")
        assert (text.returncode, text.stderr) == (0, "")
        told = top("--connect", address, "--once", "--json", "--interval", "2")
    table = text.stdout
    assert table.startswith(f"core at {address}, model ")
    assert 1 <= int(row(table, "requests running")[0]) <= 4
    assert 1 <= int(row(table, "requests waiting")[0]) <= NUM_REQUESTS
    assert row(table, "requests parked") == ["0"] and row(table, "preemptions") == ["0", "0"]
    for name in ("steps/s", "tokens computed/s"):
        rate, total = (float(cell.replace(",", "")) for cell in row(table, name))
        assert 0 < rate <= total * 2
    assert re.search(r"^waited for seats +[\d.]+ s +[\d.,]+ s$", table, re.M)
    assert re.search(r"^in FCFS.rank +[\d.]+ % +[\d.]+ s$", table, re.M)

    figures = json.loads(told.stdout)
    assert 1 <= figures["running"] <= 4 and 1 <= figures["waiting"] <= NUM_REQUESTS
    assert figures["total"]["wait_seconds"]["seats"] > 0 < figures["wait_seconds"]["seats"]
    assert 0 < figures["kv_usage"] < 1 and 1 < figures["seconds"] < 10
    assert figures["total"]["steps"] > figures["steps_per_second"] > 0
    assert figures["generated_tokens_per_second"] is None
    assert figures["total"]["prefix_hit_ratio"] > 0  # the prompts begin alike


def test_a_server_at_work_is_read_beside_it() -> None:
    options = ("--served-model-name", "box", "--num-threads", "1", "--api-key", "k1")
    with forked(*options, "--max-num-seqs", "2") as server:
        body = {"model": "box", "prompt": ["def f(x):"] * 4, "max_tokens": 200, "ignore_eos": True}
        is_over: list[bool] = []
        threads = [Thread(target=ask_until, args=(server, body, is_over)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            done = top("--url", server.url, "--once", "--json", "--api-key", "k1")
            refused = top("--url", server.url, "--once")
        finally:
            is_over.append(True)
            for thread in threads:
                thread.join()
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert 1 <= figures["running"] <= 2 and figures["is_fresh"]
        assert figures["generated_tokens_per_second"] > 0 and figures["steps_per_second"] > 0
        assert figures["total"]["generated_tokens"] > 0 < figures["total"]["prompt_tokens"]
        assert refused.returncode == 2 and "requires a key: give --api-key" in refused.stderr
        server.end()
        gone = top("--url", server.url, "--once", "--api-key", "k1")
        assert gone.returncode == 1 and f"server at {server.url} does not answer" in gone.stderr


def ask_until(server: Served, body: dict[str, Any], is_over: list[bool]) -> None:
    while not is_over:
        server.ask("/v1/completions", body, Authorization="Bearer k1")


class Terminal:
    """``metronome top`` in a terminal of its own."""

    def __init__(self, address: str) -> None:
        self._main, side = pty.openpty()
        about = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        command = [*METRONOME, "top", "--connect", address, "--interval", "0.2"]
        # A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(command, stdout=side, stderr=side, stdin=side, env=about)
        os.close(side)
        self.text = ""

    def wait_for(self, holds: Callable[[str], bool]) -> None:
        """Until what was written so far is as wanted."""
        until = time.monotonic() + WAIT_SECONDS
        while not holds(self.text):
            assert time.monotonic() < until and self._read(), self.text

    def end(self) -> int:
        """Its exit status, when it has written all that it will."""
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        """False if there is no more to come."""
        try:
            if select.select([self._main], [], [], 0.1)[0]:
                self.text += os.read(self._main, 65536).decode(errors="replace")
        except OSError:  # its other side is closed
            return False
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(core: tuple[subprocess.Popen[str], str]) -> Iterator[Terminal]:
    made = Terminal(core[1])
    yield made
    made.close()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_live_table_is_drawn_anew_until_it_is_interrupted(
    terminal: Terminal, number: signal.Signals
) -> None:
    terminal.wait_for(lambda text: text.count("requests running") >= 3)
    terminal.process.send_signal(number)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text and "interrupted" not in terminal.text
    shown, hidden = terminal.text.rfind("\x1b[?25h"), terminal.text.rfind("\x1b[?25l")
    assert shown > hidden >= 0, "the terminal has no cursor"


def test_a_core_that_goes_away_is_told_in_a_sentence(
    core: tuple[subprocess.Popen[str], str], terminal: Terminal
) -> None:
    terminal.wait_for(lambda text: "requests running" in text)
    core[0].kill()
    assert terminal.end() == 1
    said = terminal.text.splitlines()[-1]
    assert "metronome: error: the engine core died: it lost its connection" in said
    assert "Traceback" not in terminal.text


# A server that says what a test wants

PAGE = """metronome_engine_up 1
metronome_requests_running{model_name="box"} 4.0
metronome_preemptions_total{model_name="box"} 5.0
metronome_generation_tokens_total{model_name="box"} 700.0
metronome_prompt_tokens_total{model_name="box"} 8000.0
"""


class Pages(BaseHTTPRequestHandler):
    """Answers with the server's page, after its status and the key that it asks for."""

    server: PageServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.page.encode())

    def log_message(self, *args: object) -> None: ...


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.status, self.page = 200, PAGE
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), Pages)
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def pages() -> Iterator[PageServer]:
    with PageServer() as made:
        thread = Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_server_is_read_with_its_key(pages: PageServer) -> None:
    for url in ("", "/", "/metrics", "/v1", "/v1/"):
        read = ServerSource(pages.url + url, "k1").read()
        assert read.stats.num_running == 4 and (read.generated, read.prompts) == (700, 8000)
        assert read.is_fresh
    assert pages.asked == [("/metrics", "Bearer k1")] * 5
    pages.page = PAGE.replace("engine_up 1", "engine_up 0")
    assert not ServerSource(pages.url, None).read().is_fresh


@pytest.mark.parametrize(
    ("status", "page", "error", "message"),
    [
        (401, "", ConfigError, "requires a key: give --api-key, or set METRONOME_API_KEY"),
        (404, "", ConfigError, "has no /metrics: check --url"),
        (500, "", EngineDeadError, "answers with status 500"),
        (200, "vllm:num_requests_running 1\n", ConfigError, "has no metrics of Metronome"),
    ],
)
def test_what_a_server_may_say_instead(
    pages: PageServer, status: int, page: str, error: type[Exception], message: str
) -> None:
    pages.status, pages.page = status, page
    with pytest.raises(error, match=message):
        ServerSource(pages.url, None).read()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineDeadError, match=r"at http://127\.0\.0\.1:9 does not answer: "):
        ServerSource("http://127.0.0.1:9", None).read()


def test_one_table_is_of_two_readings(
    pages: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["top", "--url", pages.url, "--once", "--interval", "0.1"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["running"] == 4 and told["total"]["preemptions"] == 5 and told["seconds"] > 0.05
    assert main(command) == 0
    assert f"server at {pages.url}\n" in capsys.readouterr().out
    assert len(pages.asked) == 4
