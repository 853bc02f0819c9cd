"""A server under load and at its end, and cores of it that die; `tools/server_campaign.py` has the
long forms."""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from streams import Shape, closed_loop
from support.patience import SOON_SECONDS, WAIT_SECONDS
from support.served import Served, forked

from policylab.bench.client import Load, Row
from tools.server_campaign import COMMON, NAME, Drains, drains, outcome_of

SHORT = Shape(NAME, num_prompt=8, num_tokens=16)
LONG = Shape(NAME, num_prompt=8, num_tokens=600)
LONGEST = Shape(NAME, num_prompt=8, num_tokens=1000)  # runs while others are refused


def requests(load: Load, shape: Shape, num: int, seed: int, *, reads: bool = True) -> list[Row]:
    """This many requests, due now."""
    rng = random.Random(seed)
    rows = [Row(time.perf_counter(), shape.body(rng), reads=reads) for _ in range(num)]
    for row in rows:
        load.add(row)
    return rows


def run(load: Load, seconds: float = WAIT_SECONDS) -> None:
    load.run(time.perf_counter() + seconds)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """For the next three tests, in this order: the last one ends it."""
    limits = ("--max-num-seqs", "8", "--max-waiting-requests", "4", "--reader-timeout", "1")
    with forked(*COMMON, *limits) as made:
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
    assert all(outcome_of(row) == "whole" for row in rows if row.how == "done")
    page = server.ask("/metrics").body.decode()
    (counted,) = re.findall(r"^metronome_requests_refused_total{.*} (\S+)$", page, re.MULTILINE)
    assert float(counted) == hows["refused"]


def test_who_does_not_read_is_cut_off_and_holds_up_nobody(server: Served, seed: int) -> None:
    with Load("127.0.0.1", server.port, receive_buffer=4096) as idle:
        stuck = requests(idle, LONG, 8, seed, reads=False)
        idle.run(time.perf_counter() + 0.3)
        rows = closed_loop(("127.0.0.1", server.port), SHORT, 2, 3.5, seed=seed)
        idle.run(time.perf_counter() + WAIT_SECONDS, lambda: any(row.how == "cut" for row in stuck))
    ended = [row for row in rows if row.how != "left"]  # the end of the load cuts off the others
    assert len(rows) - len(ended) <= 2 < len(ended)
    assert Counter(map(outcome_of, ended)).keys() == {"whole"}
    assert not any(row.body for row in ended)  # those of a long run would fill the memory
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
        rows = requests(load, LONGEST, 4, seed)
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
    assert Counter(map(outcome_of, rows)).keys() == {"error"}
    assert server.process.wait() == 0 and time.monotonic() - began < SOON_SECONDS


@pytest.mark.slow
def test_every_stream_is_told_when_the_server_ends(seed: int) -> None:
    result = drains(Drains(times=1, streams=16, timeouts=(0.3,), shape=LONG), seed)
    assert not result.failures
    assert result.figures["hows"].get("error")
