"""Keeps many streams of a core in a process open and checks every token of each.

    python tools/soak.py [--minutes 10] [--streams 1000] [--clients 4] [--cancel 0.3] [--seed N]

The core's worker has no model: token n of a stream follows from the request's id and n. Prints a
line every ten seconds and a JSON line at the end. The exit status is 1 if a token was lost, doubled
or out of order, if something was not freed, or if memory grew by more than 1 MiB in 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.live_core import (  # noqa: E402
    SizedBuild,
    growth,
    num_held,
    own_directory,
    pid_of,
    rss_mib,
    start,
    wait_until,
)
from support.streams import Counts, Streams  # noqa: E402

from engine.rpc.zmq_client import EngineCoreClient  # noqa: E402

MAX_SLOPE = 1.0  # MiB in ten minutes
MIN_SLOPE_SECONDS = 240.0  # a shorter run has no meaningful slope
BLOCKS_PER_STREAM = 8  # of 16 tokens


@dataclass(frozen=True)
class Soak:
    """How many streams are held, and for how long."""

    seconds: float
    num_streams: int = 1000
    num_clients: int = 4
    cancel_share: float = 0.3
    seed: int = 0


@dataclass
class Result:
    """Result of a soak. ``slope`` is in MiB in ten minutes, of the core's resident memory."""

    counts: Counts
    seconds: float
    rss_mib: float
    slope: float
    num_left_running: int
    kv_usage: float
    leftovers: list[str]

    def failures(self) -> list[str]:
        """Failures other than wrong tokens, which raise."""
        found = []
        if self.num_left_running or self.kv_usage:
            found.append(
                f"{self.num_left_running} requests, {self.kv_usage:.2%} of the blocks held"
            )
        if self.leftovers:
            found.append(f"not cleaned up: {', '.join(self.leftovers)}")
        if self.seconds >= MIN_SLOPE_SECONDS and self.slope > MAX_SLOPE:
            found.append(f"memory grew by {self.slope} MiB in ten minutes")
        return found


def run(soak: Soak, *, say: bool = False) -> Result:
    """Holds the streams. Raises ``AssertionError`` with the stream if a token is wrong."""
    build = SizedBuild(num_blocks=BLOCKS_PER_STREAM * soak.num_streams, num_seats=soak.num_streams)
    with own_directory() as directory:
        owner = start(build)
        try:
            result = _hold(soak, owner, say)
        finally:
            owner.shutdown()
        result.leftovers = sorted(path.name for path in directory.iterdir())
    return result


def _hold(soak: Soak, owner: EngineCoreClient, say: bool) -> Result:
    began = time.monotonic()
    is_over = threading.Event()
    memory: list[tuple[float, float]] = []
    clients = [EngineCoreClient(owner.address) for _ in range(soak.num_clients)]
    share = soak.num_streams // soak.num_clients
    held = [
        Streams(client, share, random.Random(soak.seed + i), cancel_share=soak.cancel_share)
        for i, client in enumerate(clients)
    ]
    with ThreadPoolExecutor(soak.num_clients) as pool:
        futures = [pool.submit(_hold_streams, streams, is_over) for streams in held]
        while time.monotonic() - began < soak.seconds and not any(map(Future.done, futures)):
            memory.append((time.monotonic() - began, rss_mib(pid_of(owner))))
            time.sleep(min(1.0, soak.seconds / 10))
            if say and len(memory) % 10 == 0:
                print(f"{memory[-1][0]:6.0f} s  {memory[-1][1]:7.1f} MiB  {_total(held)}")
        is_over.set()
        for future in futures:
            future.result()
    seconds = time.monotonic() - began
    wait_until(lambda: not num_held(owner), 10.0)
    stats = owner.stats()
    assert stats is not None
    for client in clients:
        client.shutdown()
    return Result(
        counts=_total(held),
        seconds=round(seconds, 1),
        rss_mib=round(memory[-1][1], 1),
        slope=growth(memory),
        num_left_running=num_held(owner),
        kv_usage=stats.kv_usage,
        leftovers=[],
    )


def _hold_streams(streams: Streams, is_over: threading.Event) -> None:
    while not is_over.is_set():
        streams.turn()
    streams.finish()


def _total(held: list[Streams]) -> Counts:
    total = Counts()
    for streams in held:
        for name, value in asdict(streams.counts).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--cancel", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    soak = Soak(60.0 * args.minutes, args.streams, args.clients, args.cancel, args.seed)
    print(soak, flush=True)
    result = run(soak, say=True)
    failures = result.failures()
    print(json.dumps({**asdict(result), "failures": failures}))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
