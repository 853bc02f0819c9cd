"""A server with streams, whose core or which itself dies or is stopped."""

from __future__ import annotations

import json
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streams import Shape

from policylab.bench.client import Load, Row
from support.patience import WAIT_SECONDS
from support.served import Served, served

HANG_SECONDS = 2.0
TREE_SECONDS = 3.5  # to the end of all processes: the core has a model to let go of
BACK_SECONDS = 60.0  # to a new core in place of one that died
NAME = "box"
OPTIONS = (
    "--num-threads", "1", "--max-model-len", "1024", "--served-model-name", NAME,
    "--log-level", "error",
)  # fmt: skip
SHAPE = Shape(NAME, num_prompt=16, num_tokens=300)
NUM_STREAMS = 8


class Streaming:
    """A server, its core's process, and streams that have come to a phase."""

    def __init__(self, server: Served, load: Load, phase: str) -> None:
        self.server = server
        self.pid = server.process.pid
        self.rows: list[Row] = []
        self._load = load
        if phase == "idle":
            return
        rng = random.Random(0)
        self.rows = [Row(time.perf_counter(), SHAPE.body(rng)) for _ in range(NUM_STREAMS)]
        for row in self.rows:
            load.add(row)
        load.run(time.perf_counter() + WAIT_SECONDS, lambda: self._has_come_to(phase))
        if phase == "draining":
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)

    def read_on(self, seconds: float) -> float | None:
        """Read all to their ends; how long it took, ``None`` if some have not come to theirs."""
        began = time.perf_counter()
        self._load.run(began + seconds)
        return None if self._load.num_pending else time.perf_counter() - began

    def not_told(self) -> list[str]:
        """Streams that were cut off."""
        return [
            f"{row.how} {row.tail!r}" for row in self.rows if row.how not in ("done", "refused")
        ]

    def is_healthy(self) -> bool:
        with (
            suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{self.server.url}/health") as answer,
        ):
            return bool(json.loads(answer.read())["cores_alive"])
        return False

    def is_served(self) -> bool:
        """Whether a new request is answered as it should be."""
        body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 2}).encode()
        asked = urllib.request.Request(
            f"{self.server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with (
            suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(asked) as answer,
        ):
            return bool(json.loads(answer.read())["choices"])
        return False

    def core(self) -> int:
        """The process of its core."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        (core,) = [pid for pid in children if b"spawn_main" in _command(pid)]
        return core

    def _has_come_to(self, phase: str) -> bool:
        if phase == "prefill":
            return not any(row.sent == 0.0 for row in self.rows)
        return all(row.times for row in self.rows)


@contextmanager
def streaming(phase: str, *options: str) -> Iterator[Streaming]:
    hang = ("--core-hang-timeout", str(HANG_SECONDS))
    with served(*OPTIONS, *hang, *options) as server, Load("127.0.0.1", server.port) as load:
        yield Streaming(server, load, phase)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
