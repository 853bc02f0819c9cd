"""Hostile clients of a core: damaged messages, messages out of turn, and random bytes."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from engine.ipc import sockets
from engine.ipc.address import IPC, Address
from engine.ipc.codec import MessageEncoder
from engine.messages.wire import PROTOCOL_VERSION, Hello, ToControl
from support.wire_frames import HOSTILE
from support.wire_samples import SAMPLES, frames_of, harmless_to_others

MARKS = bytes((0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC6, 0xC9, 0xCB, 0xCF, 0xD3, 0xD9, 0xDB))
HEADS = bytes((0xC6, 0xDB, 0xDD, 0xDF))  # bin 32, str 32, array 32, map 32
HUGE = b"\xff\xff\xff\xff"
ROUNDS = (1, 1, 1, 2, 3, 6)
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


class Hostile:
    """Clients that say anything to a core: on both sockets, welcomed or not, and below ZeroMQ."""

    def __init__(self, address: Address, rng: random.Random) -> None:
        self.num_sent = 0
        self.num_answers = 0
        self._address = address
        self._rng = rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._hello = MessageEncoder().encode(Hello(PROTOCOL_VERSION, address.token, "hostile"))
        self._data = [self._dealer(address.data) for _ in range(NUM_HOSTILE)]
        self._control = [self._dealer(address.control)]
        # Who knows the token may ask for anything that is legal: an end of the core, too.
        known = frames_of(harmless_to_others(address.token))
        self._to_core = Mutator([*known, *HOSTILE], rng)
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
