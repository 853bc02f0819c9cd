"""`metronome bench serve` on a server of ours, on one that errs, and on one that is killed."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import WAIT_SECONDS
from support.served import Served, forked, free_port

from engine.cli.main import main
from policylab.bench.client import Load, Row

COMMON = ("--served-model-name", "box", "--num-threads", "1", "--max-model-len", "1024")
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
CHUNKED = EVENTS[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
TEXT = TOKEN + b"data: [DONE]\n\n"
FINISHED = "metronome_requests_finished_total{"
IPS = ("127.0.0.2", "127.0.0.1")  # a server listens at the second one only


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with forked(*COMMON) as made:
        yield made


def bench(capsys: pytest.CaptureFixture[str], port: int, *options: str) -> dict[str, Any]:
    """The result of a run."""
    main(["bench", "serve", "--port", str(port), "--json", *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_open_loop_is_measured_and_kept(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(
        capsys,
        server.port,
        *("--num-prompts", "30", "--request-rate", "20", "--random-range-ratio", "0.5"),
        *("--input-len", "40", "--output-len", "12", "--goodput", "ttft:60000", "--num-warmups=2"),
        *("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "kept.json"),
        *("--plot", str(tmp_path / "plot.svg"), "--metadata", "machine=here"),
    )
    assert found["completed"] == 30 and found["failed"] == 0 and found["model_id"] == "box"
    assert found["promises_kept"] == 30 and found["duration"] > 1.0
    assert found["p99_ttft_ms"] <= found["p99_e2el_ms"] and found["client_cpu_us_per_token"] > 0
    low, high = found["intervals"]["median_ttft_ms"]
    assert 0 < low <= found["median_ttft_ms"] <= high
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["machine"] == "here" and kept["completed"] == 30
    assert sum(kept["output_lens"]) == found["total_output_tokens"]
    assert sum(kept["input_lens"]) == found["total_input_tokens"]
    assert all(kept["generated_texts"]) and not any(kept["errors"])
    assert kept["users"] == [""] * 30 and kept["by_user"] == {}
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")


def test_a_closed_loop_keeps_its_number_of_chats_running(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(
        capsys,
        server.port,
        *("--endpoint", "/v1/chat/completions", "--max-concurrency", "3", "--duration", "1.5"),
        *("--input-len", "20", "--output-len", "10"),
    )
    assert found["max_concurrent_requests"] == 3 and found["failed"] == 0
    assert found["completed"] > 6 and found["duration"] >= 1.4
    assert found["total_output_tokens"] == 10 * found["completed"]


def test_sessions_of_the_lab_follow_their_answers(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = (
        "conversations(num_requests=12,think=0.05,turns=3,lengths='fixed(prompt=20,output=4)')"
    )
    found = bench(capsys, server.port, "--workload", workload, "--request-rate", "40")
    assert found["completed"] == 12 and found["total_output_tokens"] == 48
    assert found["total_input_tokens"] > 12 * 20  # turns repeat what was before


def test_shared_prefixes_are_found_in_the_cache(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(
        capsys,
        server.port,
        *("--dataset-name", "prefix_repetition", "--num-prompts", "20", "--max-concurrency", "1"),
        *("--prefix-repetition-prefix-len", "128", "--prefix-repetition-num-prefixes", "2"),
        *("--prefix-repetition-suffix-len", "16", "--output-len", "2", "--seed", "5"),
    )
    assert found["completed"] == 20 and found["total_cached_tokens"] == 18 * 128


@contextmanager
def scripted(*answers: bytes) -> Iterator[int]:
    """The port of a server that gives each request the next answer, and closes the connection;
    after an empty answer it closes the connection without a byte."""
    left = list(answers)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            held = []
            while left:
                connection, _ = listening.accept()
                connection.settimeout(WAIT_SECONDS)
                data = connection.recv(1 << 16)
                while data and not data.endswith(b"}"):
                    data += connection.recv(1 << 16)
                if not data:  # the client only looks whether a server is here
                    connection.close()
                elif answer := left.pop(0):
                    connection.sendall(answer)
                    connection.close()
                else:
                    held.append(connection)
            time.sleep(0.6)
            for connection in held:
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(WAIT_SECONDS)


def test_errors_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    limit = b'{"error":{"code":"rate_limit","message":"too many"}}'
    answers = (
        EVENTS + TOKEN + TOKEN + b"data: [DONE]\n\n",
        b"HTTP/1.1 429 No\r\nContent-Length: %d\r\n\r\n%s" % (len(limit), limit),
        b"HTTP/1.1 500 No\r\n\r\noops",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n"
        + TOKEN,
        EVENTS + TOKEN + b'data: {"error":{"code":"overloaded"}}\n\ndata: [DONE]\n\n',
        EVENTS + TOKEN + b"data: no JSON\n\ndata: [DONE]\n\n",
        EVENTS + b"data: [DONE]\n\n",
        b"220 ftp ready\r\n\r\n",
        b"",
    )
    with scripted(*answers) as port:
        found = bench(
            capsys,
            port,
            *("--model", "m", "--num-prompts", str(len(answers)), "--max-concurrency", "1"),
            *("--input-len", "4", "--stall-timeout", "0.3"),
        )
    assert found["completed"] == 1 and found["failed"] == 9
    assert sorted(found["errors_by_kind"]) == [
        "HTTP 429: rate_limit",
        "HTTP 500",
        "an answer without a token",
        "an error in the stream: overloaded",
        "an event that is no chunk of an answer",
        "nothing arrived for 0.3 s",
        "the answer begins with b'220 ftp ready', not with HTTP/1.1",
        "the answer is no stream of events",
        "the connection was closed after the first token",
    ]


@pytest.mark.parametrize("loop", ["connections", "clients"])
def test_a_closed_loop_waits_as_a_refusal_says(
    loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a pause, a full server would get thousands of requests a second."""
    busy = b"HTTP/1.1 503 No\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}"
    whole = EVENTS + TOKEN + b"data: [DONE]\n\n"
    options = {
        "connections": ("--num-prompts", "2", "--max-concurrency", "1", "--input-len", "4"),
        "clients": (
            "--workload",
            "closed-loop(clients=1,think=0,num_requests=2,lengths='fixed(prompt=4,output=1)')",
        ),
    }
    with scripted(busy, whole) as port:
        found = bench(capsys, port, "--model", "m", *options[loop])
    assert found["errors_by_kind"] == {"HTTP 503": 1} and found["completed"] == 1
    assert found["duration"] >= 1.0


def test_a_table_in_a_pipe_is_whole_and_has_users(
    server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    workload = "two-users(num_requests=20,flood=3,lengths='fixed(prompt=8,output=2)')"
    options = ("--workload", workload, "--request-rate", "50", "--goodput", "ttft:60000")
    assert main(["bench", "serve", "--port", str(server.port), *options]) == 0
    text = capsys.readouterr().out
    assert "…" not in text and "20 of 20 (100 %)" in text
    assert re.search(r"calm +\S +\d", text) and re.search(r"flood +\S +\d", text)


def test_ends_apart_and_connections_that_are_closed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the second address of its host, a server sends the end of each answer by itself, and then
    closes all connections."""
    number = 400
    everyone = threading.Barrier(number + 1)

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for part in (CHUNKED + b"%x\r\n%s\r\n" % (len(TEXT), TEXT), b"0\r\n\r\n"):
            connection.sendall(part)
            everyone.wait(WAIT_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        everyone.wait(WAIT_SECONDS)

    def accept() -> None:
        listening.accept()[0].close()  # the client looks at which address a server is
        for _ in range(number):
            threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
        again = listening.accept()[0]
        again.recv(1 << 16)
        again.sendall(EVENTS + TEXT)
        again.close()

    def two_addresses(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in IPS]

    with socket.create_server(("127.0.0.1", 0), backlog=number) as listening:
        threading.Thread(target=accept, daemon=True).start()
        monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
        with Load("both", listening.getsockname()[1]) as load:
            rows = [Row(time.perf_counter(), b"{}") for _ in range(number)]
            for row in rows:
                load.add(row)
            while not all(row.times for row in rows):
                load.run(time.perf_counter() + 0.05)
            everyone.wait(WAIT_SECONDS)
            load.run(time.perf_counter() + WAIT_SECONDS)
            assert {(row.how, row.error) for row in rows} == {("done", "")}
            everyone.wait(WAIT_SECONDS)  # the ends are there
            everyone.wait(WAIT_SECONDS)  # all are closed
            last = Row(time.perf_counter(), b"{}")
            load.add(last)
            load.run(time.perf_counter() + WAIT_SECONDS)
            assert (last.how, last.error) == ("done", "")


def test_a_full_server_and_one_that_is_killed_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    with forked(*COMMON, "--max-num-seqs", "2", "--max-waiting-requests", "2") as server:
        options = ("--num-prompts", "20", "--input-len", "8", "--output-len", "400")
        found = bench(capsys, server.port, *options)
        assert 2 <= found["completed"] < 20
        assert found["errors_by_kind"] == {"HTTP 503: queue_full": 20 - found["completed"]}
        killer = threading.Timer(0.5, server.process.kill)
        killer.start()
        options = ("--duration", "1.5", "--max-concurrency", "2", "--output-len", "900")
        found = bench(capsys, server.port, *options, "--input-len", "8")
        killer.join()
    kinds = found["errors_by_kind"]
    assert kinds["no connection"] > 0
    # Two ran; two more may reach the socket of the dying process, which accepts none.
    assert sum(number for kind, number in kinds.items() if "was closed" in kind) <= 4
    assert found["failed"] == sum(kinds.values())
    status = main(["bench", "serve", "--port", str(free_port())])
    assert status == 1 and "no server answers at" in capsys.readouterr().err


@pytest.mark.usefixtures("can_interrupt")
def test_an_interrupt_prints_what_is_known(server: Served) -> None:
    options = (
        "--request-rate",
        "20",
        "--duration",
        "600",
        "--input-len",
        "8",
        "--output-len",
        "90",
    )
    command = (sys.executable, "-m", "engine.cli.main", "bench", "serve", "--json")
    before = num_finished(server)
    process = subprocess.Popen(
        (*command, "--port", str(server.port), *options), stdout=subprocess.PIPE
    )
    end = time.monotonic() + WAIT_SECONDS
    while num_finished(server) < before + 5:
        assert time.monotonic() < end, "no request ends"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=WAIT_SECONDS)
    found = json.loads(out)
    assert process.returncode == 130 and found["interrupted"]
    assert found["completed"] > 0 and found["failed"] == 0


def num_finished(server: Served) -> float:
    lines = server.ask("/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(FINISHED))
