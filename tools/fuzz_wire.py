"""Feeds damaged messages to the decoders of the wire, and to a core that serves somebody else.

    python tools/fuzz_wire.py [--frames 10000000] [--hostile 100000] [--seed N]

Good frames are cut, spliced, flipped and given wrong lengths. A decoder may answer with a message
or ``WireError``, nothing else. A core must go on serving a healthy client, every token right, and
hold nothing of the hostile ones when they have gone. Prints a JSON line for each; exit status 1 at
the first failure, with the frame.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from live_core import is_running, own_directory, pid_of, rss_mib, start, wait_until  # noqa: E402
from streams import Streams  # noqa: E402
from wire_samples import SAMPLES, TOKEN, frames_of  # noqa: E402

from engine.core.zmq_client import EngineCoreClient  # noqa: E402
from engine.errors import WireError  # noqa: E402
from engine.ipc import sockets  # noqa: E402
from engine.ipc.codec import Decoder, Encoder  # noqa: E402
from engine.ipc.place import IPC, Address  # noqa: E402
from engine.messages.wire import PROTOCOL_VERSION, FromClient, Hello, ToControl  # noqa: E402

MAX_FRAME_SECONDS = 1.0  # for one frame; a pause of the machine is no failure
MARKS = bytes((0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC6, 0xC9, 0xCB, 0xCF, 0xD3, 0xD9, 0xDB))
HEADS = bytes((0xC6, 0xDB, 0xDD, 0xDF))  # bin 32, str 32, array 32, map 32
HUGE = b"\xff\xff\xff\xff"
ROUNDS = (1, 1, 1, 2, 3, 6)
NUM_PER_TURN = 100  # hostile frames between two turns of the healthy client
NUM_HOSTILE = 8  # clients


class Mutator:
    """Makes damaged frames of good ones."""

    def __init__(self, frames: Sequence[bytes], rng: random.Random) -> None:
        self._frames = list(frames)
        self._rng = rng
        self._acts: tuple[Callable[[bytearray, int], None], ...] = (
            self._flip,
            self._mark,
            self._any,
            self._cut,
            self._shorten,
            self._repeat,
            self._swell,
            self._splice,
        )

    def frame(self) -> bytes:
        rng, frames, acts = self._rng.random, self._frames, self._acts
        data = bytearray(frames[int(rng() * len(frames))])
        for _ in range(ROUNDS[int(rng() * len(ROUNDS))]):
            if data:
                acts[int(rng() * len(acts))](data, int(rng() * len(data)))
        return bytes(data)

    def _flip(self, data: bytearray, at: int) -> None:
        data[at] ^= 1 << int(self._rng.random() * 8)

    def _mark(self, data: bytearray, at: int) -> None:
        data[at] = MARKS[int(self._rng.random() * len(MARKS))]

    def _any(self, data: bytearray, at: int) -> None:
        data[at] = int(self._rng.random() * 256)

    def _cut(self, data: bytearray, at: int) -> None:
        del data[at : at + 1 + int(self._rng.random() * 8)]

    def _shorten(self, data: bytearray, at: int) -> None:
        del data[at:]

    def _repeat(self, data: bytearray, at: int) -> None:
        data[at:at] = data[at : at + 16]

    def _swell(self, data: bytearray, at: int) -> None:
        data[at : at + 1] = HEADS[at % 4 : at % 4 + 1] + HUGE

    def _splice(self, data: bytearray, at: int) -> None:
        other = self._frames[int(self._rng.random() * len(self._frames))]
        data[at:] = other[int(self._rng.random() * len(other)) :]


@dataclass
class Decoded:
    """What became of damaged frames."""

    frames: int = 0
    messages: int = 0
    refused: int = 0
    slowest_ms: float = 0.0
    seconds: float = 0.0
    grown_mib: float = 0.0

    @property
    def rate(self) -> float:
        """Frames a second, making them included."""
        return self.frames / self.seconds if self.seconds else 0.0


def fuzz_decoders(num_frames: int, seed: int) -> Decoded:
    """Raises ``AssertionError`` with the frame if a decoder answers with anything unexpected."""
    result = Decoded()
    began, before = time.monotonic(), _peak_mib()
    for index, (messages, samples) in enumerate(SAMPLES.items()):
        mutator = Mutator(frames_of(samples), random.Random(seed + index))
        share = num_frames * (index + 1) // len(SAMPLES) - result.frames
        _fuzz(Decoder(messages), mutator, share, result)
    result.seconds = round(time.monotonic() - began, 2)
    result.grown_mib = round(_peak_mib() - before, 1)
    return result


def _fuzz(decoder: Decoder[Any], mutator: Mutator, num: int, result: Decoded) -> None:
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


class Hostile:
    """Clients that say anything to a core: on both sockets, welcomed or not, and below ZeroMQ."""

    def __init__(self, address: Address, rng: random.Random) -> None:
        self.num_sent = 0
        self.num_answers = 0
        self._address = address
        self._rng = rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hello = Encoder().encode(Hello(PROTOCOL_VERSION, address.token, "hostile"))
        self._data = [self._dealer(address.data) for _ in range(NUM_HOSTILE)]
        self._control = [self._dealer(address.control)]
        # Who knows the token may ask for anything that is legal: an end of the core, too.
        good = frames_of(SAMPLES[FromClient])
        known = [frame.replace(TOKEN, address.token) for frame in good]
        self._to_core = Mutator(known, rng)
        self._to_control = Mutator(frames_of(SAMPLES[ToControl]), rng)

    def attack(self, num: int) -> None:
        """Send so many messages, and read what is answered."""
        for _ in range(num):
            self.num_sent += 1
            kind = self._rng.random()
            if kind < 0.01:
                self._shout()
            elif kind < 0.1:
                self._send(self._control[0], [self._to_control.frame()])
            else:
                at = int(self._rng.random() * NUM_HOSTILE)
                self._send(self._data[at], self._message(kind))
        for each in (*self._data, *self._control):
            self._listen(each)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _message(self, kind: float) -> list[bytes]:
        if kind < 0.15:  # who was thrown out, or has left, comes back
            return [self._hello]
        if kind < 0.2:
            return [self._to_core.frame() for _ in range(self._rng.randrange(2, 5))]
        return [self._to_core.frame()]

    def _dealer(self, address: str) -> sockets.Socket:
        made = sockets.dealer(self._context, self._address.secret)
        made.connect(address)
        return made

    def _send(self, dealer: sockets.Socket, frames: list[bytes]) -> None:
        while True:
            try:
                dealer.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:  # the core has not kept up yet
                self._listen(dealer)
                dealer.poll(10, zmq.POLLOUT)

    def _listen(self, dealer: sockets.Socket) -> None:
        with suppress(zmq.Again):
            while True:
                dealer.recv_multipart(zmq.NOBLOCK)
                self.num_answers += 1

    def _shout(self) -> None:
        """Bytes that are no ZeroMQ at all."""
        path = self._address.data.removeprefix(IPC)
        with socket.socket(socket.AF_UNIX) as raw, suppress(OSError):
            raw.settimeout(1.0)
            raw.connect(path)
            raw.sendall(self._rng.randbytes(self._rng.randrange(1, 200)))


@dataclass
class Survived:
    """What a core went through."""

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
    # The next one who comes makes the core look who is still there.
    EngineCoreClient(owner.address).shutdown()
    wait_until(lambda: not _num_left(owner), 10.0)
    assert is_running(pid)
    return Survived(
        hostile=hostile.num_sent,
        answers=hostile.num_answers,
        seconds=round(time.monotonic() - began, 2),
        healthy_finished=streams.counts.finished,
        healthy_tokens=streams.counts.tokens,
        rss_grown_mib=round(rss_mib(pid) - before, 1),
        num_left=_num_left(owner),
    )


def _num_left(owner: EngineCoreClient) -> int:
    stats = owner.stats()
    assert stats is not None
    return stats.num_running + stats.num_waiting + stats.num_parked


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
