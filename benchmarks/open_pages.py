"""Measures what open pages cost: a server's throughput with and without them, in turn.

    python benchmarks/open_pages.py MODEL_DIR [--pages 10] [--pairs 24] [--seconds 12]

One server answers --streams closed-loop streams throughout. In every second window, --pages
connections of another process ask for ``/page/now`` once a second each, like the view *Now* of the
page. Printed are the mean ratios of throughput and of the server's processor time a token, with
their 95 % intervals over the pairs of windows.
"""

import argparse
import http.client
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

import figures
from measure import cpu_of, process_tree
from server import HERE, HOST, NAME, Engine, ratio_of, running
from streams import Shape

from policylab.bench.client import Load, Row
from policylab.bench.loops import play

EVERY_SECONDS = 1.0  # as the page does
SETTLE_SECONDS = 1.0  # after a change, before a window begins
SLACK_SECONDS = 0.2  # by which a window may be longer than wanted
TICK = 0.02  # seconds between two looks of the client, which takes little of the machine then


def ask(port: int, phase: float, is_on: Event) -> None:
    """One open page, whose questions come this long after those of the first."""
    connection, after = http.client.HTTPConnection(HOST, port, timeout=60), 0
    while True:
        time.sleep(EVERY_SECONDS - (time.monotonic() - phase) % EVERY_SECONDS)
        if not is_on.is_set():
            connection.close()  # the server closes idle ones
            continue
        connection.request("GET", f"/page/now?after={after}")
        now: dict[str, Any] = json.loads(connection.getresponse().read())
        after = max([after, *(step["step"] for step in now["steps"])])


def pages(port: int, number: int, is_on: Event) -> None:
    """Open pages, whose questions are spread over the second."""
    for page in range(number):
        phase = EVERY_SECONDS * page / number
        threading.Thread(target=ask, args=(port, phase, is_on), daemon=True).start()
    threading.Event().wait()


class Windows:
    """Begins and ends windows while the load runs. Each pair is (without, with) or the reverse."""

    def __init__(self, root: int, is_on: Event, pairs: int, seconds: float) -> None:
        order = [flag for pair in range(pairs) for flag in ((False, True), (True, False))[pair % 2]]
        self._todo = order[::-1]
        self._root, self._is_on, self._seconds = root, is_on, seconds
        self._began: tuple[float, float] | None = None
        self._begins = 0.0
        self.found: list[tuple[bool, float, float, float]] = []
        """Whether pages were open, begin, end, and processor seconds of the server."""

    def watch(self, rows: list[Row], start: float) -> None:
        """Called about twenty times a second."""
        now = time.perf_counter()
        if self._began is not None and now >= self._begins + self._seconds:
            begin, cpu = self._began
            self.found.append(
                (self._todo.pop(), begin, now, cpu_of(process_tree(self._root)) - cpu)
            )
            self._began = None
            self._begins = 0.0
        if not self._todo:
            return
        if not self._begins:
            (self._is_on.set if self._todo[-1] else self._is_on.clear)()
            self._begins = now + SETTLE_SECONDS
        elif self._began is None and now >= self._begins:
            self._begins, self._began = now, (now, cpu_of(process_tree(self._root)))


def measured(args: argparse.Namespace) -> list[dict[str, float]]:
    """Tokens a second and processor microseconds a token of each window."""
    command = (sys.executable, "-m", "engine.cli.main", "serve", "--num-threads", "1")
    engine = Engine("metronome", command, {"PYTHONPATH": str(HERE.parent)})
    shape = Shape(NAME, num_prompt=32, num_tokens=128)
    is_on = multiprocessing.get_context("spawn").Event()
    with running(engine, args.model, args.port, args.log) as server:
        asker = multiprocessing.get_context("spawn").Process(
            target=pages, args=(args.port, args.pages, is_on), daemon=True
        )
        asker.start()
        windows = Windows(server.pid, is_on, args.pairs, args.seconds)
        with Load(*server.address, most_connections=args.streams, tick=TICK) as load:
            rows = play(
                load,
                shape.requests(0),
                shape.form,
                seconds=2 * args.pairs * (args.seconds + SETTLE_SECONDS + SLACK_SECONDS),
                drains=False,
                watch=windows.watch,
            ).rows
        asker.terminate()
    times = [at for row in rows for at in row.times]
    found = []
    for is_open, begin, end, cpu in windows.found:
        num = sum(begin <= at < end for at in times)
        rate = num / (end - begin)
        found.append({"pages": float(is_open), "tokens_per_s": rate, "cpu_us": 1e6 * cpu / num})
    return found


def pairs_of(found: Sequence[dict[str, float]], figure: str) -> list[tuple[float, float]]:
    """(with, without) of each pair of windows."""
    both = zip(found[::2], found[1::2], strict=True)
    return [(a[figure], b[figure]) if a["pages"] else (b[figure], a[figure]) for a, b in both]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model directory")
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each window")
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measured(args)
    rows = []
    for figure in ("tokens_per_s", "cpu_us"):
        pairs = pairs_of(found, figure)
        with_, without = (median(column) for column in zip(*pairs, strict=True))
        rows.append((figure, f"{with_:,.1f}", f"{without:,.1f}", ratio_of(pairs).strip()))
    title = f"{args.pages} open pages, {args.streams} streams"
    figures.print_table(title, ("", "with pages", "without", "with / without"), rows)
    figures.keep(args.json, windows=found)


if __name__ == "__main__":
    main()
