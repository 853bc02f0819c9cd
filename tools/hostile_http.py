"""Attacks a server over HTTP: the long form of tests/e2e/test_server_hostile.py.

    python tools/hostile_http.py [--examples 500] [--connections 1000] [--seconds 60] [--seed N]

Sends requests made from its OpenAPI document (schemathesis), damaged HTTP, slow and endless
requests next to a healthy client, and API keys that are wrong at the first or last byte. Prints a
JSON line for each; the exit status is 1 if the server failed, its memory grew, or the healthy
client was delayed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.raw_http import answer_of, connect, request, say  # noqa: E402
from support.schema_fuzz import fuzz  # noqa: E402
from support.served import Served, served  # noqa: E402

KEY = "k" * 64
OPTIONS = (
    "--served-model-name", "box", "--num-threads", "1", "--max-model-len", "64",
    "--num-kv-blocks", "400", "--dtype", "float32", "--api-key", KEY, "--header-timeout", "5",
    "--body-timeout", "5",
)  # fmt: skip
BEARER = {"Authorization": f"Bearer {KEY}"}
BODY = json.dumps({"model": "box", "prompt": "x", "max_tokens": 4}).encode()
GOOD = request("/v1/completions", BODY, **BEARER)

MAX_GROWN_MIB = 50
MAX_SLOWER = 1.2  # the healthy client's p99 next to hostile ones, against alone
MAX_T = 4.5
NUM_KEYS = 20_000


class Healthy:
    """A client that sends one request after the other and times the answers."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []
        self.wrong = 0

    def __enter__(self) -> Healthy:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            answer = say(self._server.port, GOOD)
            self.seconds.append(answer.seconds)
            self.wrong += answer.status != 200

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * len(self.seconds))] if self.seconds else 0.0


def mutants(server: Served, seconds: float, seed: int) -> dict[str, Any]:
    """Send valid requests with bytes removed, doubled, flipped or inserted."""
    dice, end, statuses = random.Random(seed), time.monotonic() + seconds, dict[str, int]()
    while time.monotonic() < end:
        data = bytearray(GOOD)
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(data))
            match dice.randrange(4):
                case 0:
                    del data[place : place + dice.randint(1, 9)]
                case 1:
                    data[place] = dice.randrange(256)
                case 2:
                    data[place:place] = data[place : place + dice.randint(1, 40)]
                case _:
                    data[place:place] = dice.choice(
                        [
                            b"\r\n",
                            b"\0",
                            b": ",
                            b"Transfer-Encoding: chunked\r\n",
                            b"\n",
                            b"\xff" * 9,
                        ]
                    )
        status = str(say(server.port, bytes(data), wait=0.3).status)
        statuses[status] = statuses.get(status, 0) + 1
    allowed = {"200", "400", "401", "404", "405", "431", "505", "None"}  # None: it waits for more
    return {"statuses": statuses, "is_ok": statuses.keys() <= allowed}


def slow(server: Served, num: int, seconds: float) -> dict[str, Any]:
    """Keep connections that send a byte a second, next to a healthy client."""
    memory = psutil.Process(server.process.pid).memory_info
    with Healthy(server) as alone:
        time.sleep(seconds / 2)
    before, end = memory().rss, time.monotonic() + seconds / 2
    peak = before
    socks = [connect(server.port) for _ in range(num)]
    with Healthy(server) as healthy:
        while time.monotonic() < end:
            for place, sock in enumerate(socks):
                try:
                    sock.sendall(b"X")
                except OSError:
                    sock.close()
                    socks[place] = connect(server.port)
            peak = max(peak, memory().rss)
            time.sleep(1)
    for sock in socks:
        sock.close()
    grown = (peak - before) / (1 << 20)
    return {
        "connections": num,
        "grown_mib": round(grown, 1),
        "p99_alone_ms": round(1e3 * alone.p99, 2),
        "p99_meanwhile_ms": round(1e3 * healthy.p99, 2),
        "is_ok": grown < MAX_GROWN_MIB
        and not alone.wrong + healthy.wrong
        and healthy.p99 < MAX_SLOWER * alone.p99 + 0.01,  # the senders are on the same processors
    }


def endless(server: Served) -> dict[str, Any]:
    """Send a gibibyte as one header, as many headers, and as a body without and with a length."""
    memory = psutil.Process(server.process.pid).memory_info
    before, part = memory().rss, b"a" * (1 << 20)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        + f"Authorization: Bearer {KEY}\r\n".encode()
    )
    cases: dict[str, tuple[bytes, bytes]] = {
        "one header": (head + b"X: ", part),
        "many headers": (head, b"X: a\r\n" * (len(part) // 6)),
        "chunks": (head + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + part + b"\r\n"),
        "a length": (head + b"Content-Length: 1073741824\r\n\r\n", part),
    }
    answers = {
        name: say(server.port, first, *[more] * 1024) for name, (first, more) in cases.items()
    }
    grown = (memory().rss - before) / (1 << 20)
    statuses = {name: answer.status for name, answer in answers.items()}
    is_ok = set(statuses.values()) <= {413, 431} and grown < MAX_GROWN_MIB
    return {"statuses": statuses, "grown_mib": round(grown, 1), "is_ok": is_ok}


def key_times(server: Served, num: int) -> dict[str, Any]:
    """Compare the times of refusals of keys that are wrong early and late (Welch's t)."""
    keys = ["x" + KEY[1:], KEY[:-1] + "x"]
    requests = [request("/v1/models", Authorization=f"Bearer {key}") for key in keys]
    times: tuple[list[float], list[float]] = ([], [])
    with connect(server.port) as sock:
        for which in random.Random(0).choices((0, 1), k=2 * num):
            began = time.perf_counter()
            sock.sendall(requests[which])
            assert answer_of(sock, began).status == 401
            times[which].append(time.perf_counter() - began)
    cut = sorted(times[0] + times[1])[int(0.95 * 2 * num)]  # without pauses of the machine
    first, last = ([each for each in one if each < cut] for one in times)
    spread = statistics.variance(first) / len(first) + statistics.variance(last) / len(last)
    t = (statistics.mean(first) - statistics.mean(last)) / spread**0.5
    return {"num": num, "t": round(t, 2), "is_ok": abs(t) < MAX_T}


def document(server: Served, examples: int, seed: int) -> dict[str, Any]:
    found = fuzz(server.url, examples=examples, seed=seed, seconds=3600, key=KEY)
    if found.status:
        print(found.said, file=sys.stderr)
    return {"cases": found.num_cases, "is_ok": found.status == 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with served(*OPTIONS) as server:
        tests: dict[str, Callable[[], dict[str, Any]]] = {
            "document": lambda: document(server, args.examples, args.seed),
            "mutants": lambda: mutants(server, args.seconds, args.seed),
            "slow": lambda: slow(server, args.connections, args.seconds),
            "endless": lambda: endless(server),
            "key_times": lambda: key_times(server, NUM_KEYS),
        }
        is_ok = True
        for name, run in tests.items():
            began = time.monotonic()
            result = run()
            print(
                json.dumps({"test": name, **result, "seconds": round(time.monotonic() - began, 1)})
            )
            is_ok = is_ok and result["is_ok"] and say(server.port, GOOD).status == 200
        is_ok = is_ok and server.end() == 0
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
