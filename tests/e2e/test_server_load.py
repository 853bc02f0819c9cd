"""A server under load, at its end, and behind it cores that die; `tools/server_campaign.py` has the
long forms."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from server_load import Load, Row, Shape, closed_loop
from support.kill_cells import Scene
from support.live_core import wait_until
from support.patience import SOON_SECONDS, WAIT_SECONDS
from support.served import Served, free_port, served

from tools.server_campaign import COMMON, NAME, Disconnects, Drains, disconnects, drains, how_told

SHORT = Shape(NAME, num_prompt=8, num_tokens=16)
LONG = Shape(NAME, num_prompt=8, num_tokens=600)


def requests(load: Load, shape: Shape, num: int, seed: int, *, reads: bool = True) -> list[Row]:
    """So many, due now."""
    rng = random.Random(seed)
    rows = [Row(time.perf_counter(), shape.body(rng), reads=reads) for _ in range(num)]
    for row in rows:
        load.add(row)
    return rows


def run(load: Load, seconds: float = WAIT_SECONDS) -> None:
    load.run(time.perf_counter() + seconds)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """For the next four tests, in this order: the last one ends it."""
    limits = ("--max-num-seqs", "8", "--max-waiting-requests", "4", "--reader-timeout", "1")
    with served(*COMMON, *limits) as made:
        yield made


def test_a_full_queue_refuses_and_those_taken_are_served(server: Served, seed: int) -> None:
    with Load("127.0.0.1", server.port) as load:
        rows = requests(load, LONG, 40, seed)
        run(load)
    hows = Counter(row.how for row in rows)
    assert hows["refused"] > 10 and hows["done"] >= 4 and len(hows) == 2, hows
    refused = next(row for row in rows if row.how == "refused")
    assert refused.status == 503 and b"retry-after: " in refused.tail.lower()
    assert json.loads(refused.tail.partition(b"\r\n\r\n")[2])["error"]["code"] == "queue_full"
    assert all(how_told(row) == "whole" for row in rows if row.how == "done")


def test_requests_beyond_a_loads_connections_are_sent_when_others_are_done(
    server: Served, seed: int
) -> None:
    with Load("127.0.0.1", server.port, most_connections=2) as load:
        rows = requests(load, SHORT, 9, seed)
        run(load)
    assert Counter(map(how_told, rows)) == {"whole": 9}
    for row in rows:
        assert sum(other.sent <= row.sent < other.ended for other in rows) <= 2


def test_who_does_not_read_is_cut_off_and_holds_up_nobody(server: Served, seed: int) -> None:
    with Load("127.0.0.1", server.port, receive_buffer=4096) as idle:
        stuck = requests(idle, LONG, 8, seed, reads=False)
        idle.run(time.perf_counter() + 0.3)
        rows = closed_loop(("127.0.0.1", server.port), SHORT, 2, 3.5, seed=seed)
        idle.run(time.perf_counter() + WAIT_SECONDS, lambda: any(row.how == "cut" for row in stuck))
    assert Counter(map(how_told, rows[:-2])).keys() == {"whole"} and len(rows) > 4
    assert Counter(row.how for row in stuck)["cut"] >= 1


def test_an_end_refuses_on_open_connections_and_a_second_signal_aborts(
    server: Served, seed: int
) -> None:
    with (
        Load("127.0.0.1", server.port) as load,
        closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)) as kept,
        closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)) as new,
    ):
        kept.request("GET", "/v1/models")
        kept.getresponse().read()
        rows = requests(load, LONG, 4, seed)
        load.run(time.perf_counter() + WAIT_SECONDS, lambda: all(row.times for row in rows))
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        for connection in (kept, new):
            connection.request("POST", "/v1/completions", LONG.body(random.Random(seed)))
            answer = connection.getresponse()
            assert answer.status == 503 and json.loads(answer.read())["error"]["code"] == "draining"
            assert answer.getheader("Connection") == "close"
            assert int(answer.getheader("Retry-After") or 0) >= 1
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        run(load)
    assert Counter(map(how_told, rows)).keys() == {"told"}
    assert server.process.wait() == 0 and time.monotonic() - began < SOON_SECONDS


def test_every_stream_is_told_when_the_server_ends(seed: int) -> None:
    result = drains(Drains(times=1, streams=16, timeouts=(0.3,), shape=LONG), seed)
    assert not result.failures
    assert result.figures["hows"].get("told")


def test_clients_that_leave_leave_nothing_behind(seed: int) -> None:
    result = disconnects(Disconnects(seconds=2.0, streams=60, shape=SHORT), seed)
    assert not result.failures
    assert result.figures["hows"]["left"] > 10


def test_one_of_two_cores_dies_and_then_the_other(seed: int) -> None:
    with served(*COMMON, "--data-parallel-size", "2") as server:
        first, second = cores_of(server)
        with Load("127.0.0.1", server.port) as load:
            rows = requests(load, LONG, 12, seed)
            load.run(time.perf_counter() + WAIT_SECONDS, lambda: all(row.times for row in rows))
            os.kill(first, signal.SIGKILL)
            run(load)
        hows = Counter(map(how_told, rows))
        assert hows["told"] >= 3 and hows["whole"] >= 3 and len(hows) == 2, hows
        told = next(row for row in rows if how_told(row) == "told")
        assert b'"code":"core_died"' in told.tail
        assert health(server) == (200, {"cores": 2, "cores_alive": 1})
        rows = closed_loop(("127.0.0.1", server.port), SHORT, 2, 0.5, seed=seed)
        assert how_told(rows[0]) == "whole"
        os.kill(second, signal.SIGKILL)
        assert server.process.wait(WAIT_SECONDS) == 1


def cores_of(server: Served) -> list[int]:
    """Their processes; another one is Python's, and watches shared memory."""
    tree = Scene.tree(server.process.pid)[1:]
    return [pid for pid in tree if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def health(server: Served) -> tuple[int, object]:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=WAIT_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, None


def test_a_server_that_is_ended_while_it_starts_ends_in_order() -> None:
    server = Served.start(free_port(), *COMMON)
    try:
        tree = wait_until(lambda: len(Scene.tree(server.process.pid)) > 1)
        assert tree is not None, "no core was started"
        pids = Scene.tree(server.process.pid)
        assert server.end() == 0
        assert wait_until(lambda: not Scene.alive(pids)) is not None
    finally:
        server.process.kill()
