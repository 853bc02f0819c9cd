"""Stress tests of the server: overload, stalled readers, ends in mid-stream, malformed calls.

    python tools/server_campaign.py overload [--seconds 60] [--factor 10]
    python tools/server_campaign.py stalled [--stalled 500] [--others 100]
    python tools/server_campaign.py drains [--times 200] [--streams 64]
    python tools/server_campaign.py disconnects [--minutes 5] [--streams 1000]
    python tools/server_campaign.py calls [--answers 30000]
    python tools/server_campaign.py all

Each but `calls` starts `metronome serve` with the shipped model or --model, in processes of its
own. Prints a JSON line for each; the exit status is 1 if there is a failure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from measure import quantile  # noqa: E402
from speech.mutations import Mutations  # noqa: E402
from streams import (  # noqa: E402
    Promise,
    Shape,
    closed_loop,
    open_loop,
    poisson,
    settled_after,
    summary,
)
from support.live_core import growth, num_held, rss_mib, wait_until  # noqa: E402
from support.served import Served, served  # noqa: E402

from engine.rpc.zmq_client import EngineCoreClient  # noqa: E402
from policylab.bench.client import Load, Row  # noqa: E402

NAME = "box"
COMMON = ("--served-model-name", NAME, "--num-threads", "1", "--max-model-len", "1024")
OVERLOAD_SHAPE = Shape(NAME, num_prompt=32, num_tokens=32)
STALLED_SHAPE = Shape(NAME, num_prompt=16, num_tokens=600)
DRAINS_SHAPE = Shape(NAME, num_prompt=8, num_tokens=120)
DISCONNECTS_SHAPE = Shape(NAME, num_prompt=16, num_tokens=60)
OVERLOAD_PROMISE = Promise(ttft=2.0, itl=0.5)
MAX_REFUSAL_MS = 10.0
MIN_GOODPUT_SHARE = 0.9
UNREAD_SECONDS = 0.1  # after sending: the server ended before it read the request
MAX_RECOVERY_SECONDS = 10.0
MAX_STALLED_MIB = 150.0
MAX_OTHERS_ITL = 1.2
LATE_SECONDS = 2.0  # from the deadline of a drain to the end of the process
MAX_SLOPE = 10.0  # MiB in ten minutes, of the server's memory under a steady load
MIN_SLOPE_SECONDS = 240.0  # a shorter run has no meaningful slope
MAX_WRONG = 20  # answers, after which no more are drawn


@dataclass
class Result:
    """Figures and failures of one stress test."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def check(self, is_so: object, failure: str) -> None:
        if not is_so:
            self.failures.append(failure)


# Ten times the load


@dataclass(frozen=True)
class Overload:
    """An open load of ``factor`` times the server's capacity."""

    seconds: float = 60.0
    factor: float = 10.0
    measure_seconds: float = 15.0
    promise: Promise = OVERLOAD_PROMISE
    queue_seconds: float = 1.0
    shape: Shape = OVERLOAD_SHAPE
    options: tuple[str, ...] = COMMON


def overload(plan: Overload, seed: int = 0) -> Result:
    """Measure goodput in overload, the time to refuse others, and the time to recover."""
    result, promise = Result("overload"), plan.promise
    seeds = itertools.count(100 * seed)  # no prompt comes twice: it would be cached
    with served(*plan.options, "--max-queue-seconds", str(plan.queue_seconds)) as server:
        address = ("127.0.0.1", server.port)
        closed_loop(address, plan.shape, 8, 2.0, seed=next(seeds))  # warm
        rows = closed_loop(address, plan.shape, 64, plan.measure_seconds, seed=next(seeds))
        capacity = sum(row.is_whole for row in rows) / plan.measure_seconds
        result.figures["capacity_per_s"] = round(capacity, 2)
        goodputs = {}
        for share in (0.7, 0.9, 1.1):
            rate = share * capacity
            rows = open_loop(address, plan.shape, rate, plan.measure_seconds, next(seeds))
            goodputs[str(share)] = summary(rows, promise, _span(rows))
        result.figures["below"] = goodputs
        peak = max(each["goodput_per_s"] for each in goodputs.values())
        load = Load(*address)
        rows = poisson(load, plan.shape, plan.factor * capacity, plan.seconds, next(seeds))
        ended = time.perf_counter() + plan.seconds
        load.run(ended)
        spare = 2 * MAX_RECOVERY_SECONDS
        after = poisson(load, plan.shape, 0.5 * capacity, spare, next(seeds))
        load.run(ended + 4 * MAX_RECOVERY_SECONDS)
        load.close()
        figures = result.figures["overload"] = summary(rows, promise, plan.seconds)
        late = result.figures["server_refusal_ms_p99"] = refusal_ms(server, 0.99)
        recovery = settled_after(after, ended, promise)
    share = figures["goodput_per_s"] / peak if peak else 0.0
    result.figures |= {
        "peak_per_s": peak,
        "goodput_share": round(share, 3),
        "recovery_s": round(recovery, 2),
    }
    result.check(share >= MIN_GOODPUT_SHARE, f"goodput falls to {share:.0%} of its peak")
    result.check(late <= MAX_REFUSAL_MS, f"1 % of refusals take the server over {late} ms")
    result.check(recovery <= MAX_RECOVERY_SECONDS, f"recovery takes {recovery:.1f} s")
    result.check(not figures["other"], f"{figures['other']} requests ended in another way")
    return result


def refusal_ms(server: Served, share: float) -> float:
    """The quantile of the server's time to refuse, rounded up to a bucket of its metric."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    pattern = r'metronome_http_refusal_seconds_bucket{le="([^"]+)"[^}]*} ([0-9.e+]+)'
    buckets = [(float(le), float(num)) for le, num in re.findall(pattern, text)]
    total = buckets[-1][1]
    return 1e3 * next(bound for bound, num in buckets if num >= share * total)


def _span(rows: list[Row]) -> float:
    """Seconds from the first request to the last end."""
    return max(row.ended for row in rows) - min(row.due for row in rows)


# Readers that do not read


@dataclass(frozen=True)
class Stalled:
    """Streams, most of whose clients never read."""

    stalled: int = 500
    others: int = 100
    seconds: float = 60.0
    reader_timeout: float = 30.0
    shape: Shape = STALLED_SHAPE
    options: tuple[str, ...] = (
        *COMMON,
        *("--multiprocess", "--max-num-seqs", "640", "--num-kv-blocks", "24000"),
    )


def stalled(plan: Stalled, seed: int = 0) -> Result:
    """Run one load with and without stalled readers; compare memory and the others' gaps."""
    result = Result("stalled")
    timeout = ("--reader-timeout", str(plan.reader_timeout))
    with served(*plan.options, *timeout) as server:
        closed_loop(("127.0.0.1", server.port), replace(plan.shape, num_tokens=8), 8, 1.0)
        before = rss_mib(server.process.pid)
        all_read = _crowd(plan, server, reads=True, seed=seed)
        none_read = _crowd(plan, server, reads=False, seed=seed)
    result.figures |= {
        "rss_mib_before": round(before, 1),
        "rss_mib_all_read": round(all_read.rss_mib, 1),
        "rss_mib_none_read": round(none_read.rss_mib, 1),
        "itl_ms_p99_all_read": round(1e3 * all_read.itl_p99, 2),
        "itl_ms_p99_none_read": round(1e3 * none_read.itl_p99, 2),
        "others": dict(none_read.hows),
    }
    grown = none_read.rss_mib - before
    result.check(grown <= MAX_STALLED_MIB, f"memory grew by {grown:.0f} MiB")
    ratio = none_read.itl_p99 / all_read.itl_p99 if all_read.itl_p99 else 0.0
    result.figures["itl_ratio"] = round(ratio, 3)
    result.check(ratio <= MAX_OTHERS_ITL, f"p99 between tokens is {ratio:.2f} times as long")
    result.check(set(none_read.hows) <= {"done", "left"}, f"others ended: {none_read.hows}")
    return result


@dataclass
class Crowd:
    """Figures of the clients that read."""

    itl_p99: float
    rss_mib: float
    hows: Counter[str]


def _crowd(plan: Stalled, server: Served, *, reads: bool, seed: int) -> Crowd:
    rng = random.Random(seed)
    idlers = Load("127.0.0.1", server.port, receive_buffer=4096)
    now = time.perf_counter()
    for _ in range(plan.stalled):
        idlers.add(Row(now, plan.shape.body(rng), reads=reads))
    is_over = threading.Event()
    deadline = time.perf_counter() + plan.seconds
    thread = threading.Thread(target=lambda: idlers.run(deadline, is_over.is_set), daemon=True)
    thread.start()
    sizes: list[float] = []
    readers: list[Row] = []

    def others() -> None:
        address = ("127.0.0.1", server.port)
        readers.extend(closed_loop(address, plan.shape, plan.others, plan.seconds, seed=seed))

    reading = threading.Thread(target=others, daemon=True)
    reading.start()
    while reading.is_alive():
        sizes.append(rss_mib(server.process.pid))
        time.sleep(0.1)
    is_over.set()
    thread.join()
    idlers.close()
    gaps = [gap for row in readers for gap in row.gaps]
    return Crowd(quantile(gaps, 0.99, 0.0), max(sizes), Counter(row.how for row in readers))


# Ends in mid-stream


@dataclass(frozen=True)
class Drains:
    """Servers that get SIGTERM at any moment."""

    times: int = 200
    streams: int = 64
    timeouts: tuple[float, ...] = (0.0, 0.3, 1.0, 30.0)
    shape: Shape = DRAINS_SHAPE
    options: tuple[str, ...] = COMMON


def drains(plan: Drains, seed: int = 0) -> Result:
    """Check that every stream that began is ended properly, and that the server exits in time."""
    result, hows = Result("drains"), Counter[str]()
    rng, slowest = random.Random(seed), 0.0
    for index in range(plan.times):
        timeout = rng.choice(plan.timeouts)
        with served(*plan.options, "--drain-timeout", str(timeout)) as server:
            drained = _drain(plan, server, rng)
        late = drained.seconds - timeout
        slowest = max(slowest, late)
        hows.update(drained.hows)
        what = f"drain {index} of {timeout:g} s (seed {seed})"
        result.check(not drained.wrong, f"{what}: {drained.wrong}")
        result.check(drained.status == 0, f"{what}: exit status {drained.status}")
        result.check(late <= LATE_SECONDS, f"{what}: ended {late:.1f} s after the deadline")
    result.figures = {"hows": dict(hows), "longest_after_deadline_s": round(slowest, 2)}
    return result


@dataclass
class Drained:
    """How one server ended."""

    hows: Counter[str]
    wrong: list[str]
    status: int
    seconds: float


def _drain(plan: Drains, server: Served, rng: random.Random) -> Drained:
    load, rows = Load("127.0.0.1", server.port), list[Row]()
    now = time.perf_counter()
    for _ in range(plan.streams):
        rows.append(Row(now + rng.random() * 0.5, plan.shape.body(rng)))
        load.add(rows[-1])
    load.run(now + rng.random() * 1.5)
    server.process.send_signal(signal.SIGTERM)
    began = time.perf_counter()
    load.run(began + 40.0)
    load.close()
    status = server.process.wait(40.0)
    seconds = time.perf_counter() - began
    hows, wrong = Counter[str](), []
    for row in rows:
        how = outcome_of(row)
        hows[how] += 1
        if how.startswith("wrong"):
            wrong.append(how)
    return Drained(hows, wrong, status, seconds)


def outcome_of(row: Row) -> str:
    """How a stream ended for its client; "wrong: ..." if that is a failure."""
    if row.how == "refused":
        is_right = row.status == 503 and b"etry-" in row.tail and b"onnection: close" in row.tail
        return "refused" if is_right else f"wrong: refused by {row.tail!r}"
    if row.how == "unreachable":
        return "unreachable"
    if row.how == "cut" and not row.status and row.ended - row.sent <= UNREAD_SECONDS:
        return "unanswered"  # the process ended before it could read it
    if row.how != "done":
        return f"wrong: {row.how} after {row.num_events} events: {row.tail!r}"
    if row.is_failed:
        return "error"
    wanted = row.about.num_output if row.about else json.loads(row.body)["max_tokens"]
    if row.num_tokens != wanted:
        return f"wrong: {row.num_tokens} tokens of {wanted}"
    return "whole"


# Clients that leave


@dataclass(frozen=True)
class Disconnects:
    """Many streams, and clients that leave them."""

    seconds: float = 300.0
    streams: int = 1000
    leaving: float = 0.3
    shape: Shape = DISCONNECTS_SHAPE
    options: tuple[str, ...] = (*COMMON[2:], "--num-kv-blocks", "16000")
    """Options of the core."""


def disconnects(plan: Disconnects, seed: int = 0) -> Result:
    """Check that no token is lost, and that no request or block is held at the end."""
    result, rng = Result("disconnects"), random.Random(seed)
    with (
        core(*plan.options) as (address, watcher),
        served("--core-address", address, "--served-model-name", NAME) as server,
    ):
        rows, memory = _come_and_go(plan, server, rng)
        idle = wait_until(lambda: not num_held(watcher), 10.0)
        held, stats = num_held(watcher), watcher.stats()
        assert stats is not None
        status = server.end()
    grown = growth(memory)
    hows = Counter(row.how for row in rows)
    result.figures = {
        "hows": dict(hows),
        "tokens": sum(row.num_tokens for row in rows),
        "rss_mib": round(memory[-1][1], 1),
        "slope_mib_in_10_min": grown,
        "seconds_until_idle": idle,
        "kv_usage": stats.kv_usage,
    }
    result.check(idle is not None, f"{held} requests are held")
    result.check(stats.kv_usage == 0.0, f"{stats.kv_usage:.2%} of the blocks are held")
    result.check(set(hows) <= {"done", "left"}, f"requests ended: {dict(hows)}")
    wrong = [
        how for how in map(outcome_of, rows) if how not in ("whole",) and "wrong: left" not in how
    ]
    result.check(not wrong, f"{len(wrong)} streams were wrong: {wrong[:3]}")
    result.check(status == 0, f"exit status {status}")
    if plan.seconds >= MIN_SLOPE_SECONDS:
        result.check(grown <= MAX_SLOPE, f"memory grows by {grown} MiB in ten minutes")
    return result


def _come_and_go(
    plan: Disconnects, server: Served, rng: random.Random
) -> tuple[list[Row], list[tuple[float, float]]]:
    """Streams that ended, and the server's memory by time."""
    load, rows, memory = (
        Load("127.0.0.1", server.port, tick=0.002),
        list[Row](),
        list[tuple[float, float]](),
    )
    began = time.perf_counter()

    def another(due: float) -> None:
        leaves = rng.random() < plan.leaving
        load.add(Row(due, plan.shape.body(rng), leave_after=rng.randint(1, 30) if leaves else 0))

    def again(row: Row) -> None:
        rows.append(row)
        if time.perf_counter() < began + plan.seconds:
            another(time.perf_counter())

    load.on_end = again
    for _ in range(plan.streams):
        another(began + rng.random())
    while load.num_pending and time.perf_counter() < began + plan.seconds + 60.0:
        load.run(time.perf_counter() + 1.0)
        memory.append((time.perf_counter() - began, rss_mib(server.process.pid)))
    load.close()
    return rows, memory


# Answers with calls


def calls(num_answers: int, seed: int = 0) -> Result:
    """Parse model outputs with random slips in their tool calls, whole and in pieces."""
    mutations = Mutations(random.Random(seed))
    began = time.perf_counter()
    while mutations.num_read < num_answers and len(mutations.wrong) < MAX_WRONG:
        mutations.draw()
    figures = {
        "num_answers": mutations.num_read,
        "num_calls": mutations.num_calls,
        "seconds": time.perf_counter() - began,
    }
    return Result("calls", figures, mutations.wrong)


@contextmanager
def core(*options: str) -> Iterator[tuple[str, EngineCoreClient]]:
    """Start a core in a process; its address, and a client to read its statistics."""
    command = [sys.executable, "-m", "engine.cli.main", "core", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            address = running.stdout.readline().removeprefix("core address: ").strip()
            watcher = EngineCoreClient.connect(address)
            yield address, watcher
            watcher.shutdown()
        finally:
            running.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "what", choices=("overload", "stalled", "drains", "disconnects", "calls", "all")
    )
    parser.add_argument("--model", help="a directory; the model in the box if not given")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--stalled", type=int, default=500)
    parser.add_argument("--others", type=int, default=100)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--answers", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    model = ("--model", args.model) if args.model else ()
    runs = {
        "overload": lambda: overload(
            Overload(args.seconds, args.factor, options=(*COMMON, *model)), args.seed
        ),
        "stalled": lambda: stalled(
            Stalled(args.stalled, args.others, args.seconds, options=(*Stalled.options, *model)),
            args.seed,
        ),
        "drains": lambda: drains(
            Drains(args.times, args.streams or 64, options=(*COMMON, *model)), args.seed
        ),
        "disconnects": lambda: disconnects(
            Disconnects(
                60.0 * args.minutes, args.streams or 1000, options=(*Disconnects.options, *model)
            ),
            args.seed,
        ),
        "calls": lambda: calls(args.answers, args.seed),
    }
    failed = False
    for name in runs if args.what == "all" else (args.what,):
        result = runs[name]()
        print(json.dumps(asdict(result)), flush=True)
        failed |= bool(result.failures)
    return failed


if __name__ == "__main__":
    sys.exit(main())
