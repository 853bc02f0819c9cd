"""Feeds damaged messages to the wire's decoders, and to a core that serves a healthy client.

    python tools/fuzz_wire.py [--frames 10000000] [--hostile 100000] [--seed N]

Valid frames are cut, spliced, flipped and given wrong lengths. A decoder must return a message or
raise ``WireError``. A core must send a healthy client every token, and free what the hostile ones
held when they have left. Prints a JSON line for decoders and core; the exit status is 1 at the
first failure, whose frame is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.hostile import Hostile, Mutator  # noqa: E402
from support.live_core import (  # noqa: E402
    is_running,
    num_held,
    own_directory,
    pid_of,
    rss_mib,
    start,
    wait_until,
)
from support.streams import Streams  # noqa: E402
from support.wire_samples import SAMPLES, frames_of  # noqa: E402

from engine.errors import WireError  # noqa: E402
from engine.ipc.codec import MessageDecoder  # noqa: E402
from engine.rpc.zmq_client import EngineCoreClient  # noqa: E402

MAX_FRAME_SECONDS = 1.0  # for one frame; a pause of the machine is no failure
NUM_PER_TURN = 100  # hostile frames between two turns of the healthy client


@dataclass
class Decoded:
    """Counts of damaged frames."""

    frames: int = 0
    messages: int = 0
    refused: int = 0
    slowest_ms: float = 0.0
    seconds: float = 0.0
    grown_mib: float = 0.0

    @property
    def rate(self) -> float:
        """Frames a second, with the time to make them."""
        return self.frames / self.seconds if self.seconds else 0.0


def fuzz_decoders(num_frames: int, seed: int) -> Decoded:
    """Raises ``AssertionError`` with the frame if a decoder answers with anything unexpected."""
    result = Decoded()
    began, before = time.monotonic(), _peak_mib()
    for index, (messages, samples) in enumerate(SAMPLES.items()):
        mutator = Mutator(frames_of(samples), random.Random(seed + index))
        share = num_frames * (index + 1) // len(SAMPLES) - result.frames
        _fuzz(MessageDecoder(messages), mutator, share, result)
    result.seconds = round(time.monotonic() - began, 2)
    result.grown_mib = round(_peak_mib() - before, 1)
    return result


def _fuzz(decoder: MessageDecoder[Any], mutator: Mutator, num: int, result: Decoded) -> None:
    slowest, refused = 0.0, 0
    for _ in range(num):
        frame = mutator.frame()
        began = time.perf_counter()
        try:
            decoder.decode([frame])
        except WireError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{frame.hex()}: {type(error).__name__}: {error}") from error
        took = time.perf_counter() - began
        if took > slowest:
            slowest = took
            assert took < MAX_FRAME_SECONDS, f"{frame.hex()} took {took:.3f} s"
    result.frames += num
    result.refused += refused
    result.messages += num - refused
    result.slowest_ms = round(max(result.slowest_ms, 1000 * slowest), 3)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass
class Survived:
    """Counts of an attack that a core survived."""

    hostile: int
    answers: int
    seconds: float
    healthy_finished: int
    healthy_tokens: int
    rss_grown_mib: float
    num_left: int


def fuzz_core(num_messages: int, seed: int) -> Survived:
    """Raises ``AssertionError`` if the core does not survive, or a healthy client notices."""
    rng = random.Random(seed)
    with own_directory():
        owner = start()
        try:
            return _attack(owner, num_messages, rng)
        finally:
            owner.shutdown()


def _attack(owner: EngineCoreClient, num_messages: int, rng: random.Random) -> Survived:
    began, pid = time.monotonic(), pid_of(owner)
    before = rss_mib(pid)
    streams = Streams(owner, 8, rng)
    hostile = Hostile(owner.address, rng)
    while hostile.num_sent < num_messages:
        hostile.attack(min(NUM_PER_TURN, num_messages - hostile.num_sent))
        streams.turn()
    streams.finish()
    hostile.close()
    # A core notices clients that have left when the next one connects.
    EngineCoreClient(owner.address).shutdown()
    wait_until(lambda: not num_held(owner), 10.0)
    assert is_running(pid)
    return Survived(
        hostile=hostile.num_sent,
        answers=hostile.num_answers,
        seconds=round(time.monotonic() - began, 2),
        healthy_finished=streams.counts.finished,
        healthy_tokens=streams.counts.tokens,
        rss_grown_mib=round(rss_mib(pid) - before, 1),
        num_left=num_held(owner),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000_000, help="for the decoders")
    parser.add_argument("--hostile", type=int, default=100_000, help="for a live core")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    decoded = fuzz_decoders(args.frames, args.seed)
    print(json.dumps({**asdict(decoded), "frames_s": round(decoded.rate)}), flush=True)
    survived = fuzz_core(args.hostile, args.seed)
    print(json.dumps(asdict(survived)))
    return bool(survived.num_left)


if __name__ == "__main__":
    sys.exit(main())
