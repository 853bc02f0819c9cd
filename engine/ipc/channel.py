"""Messages with bytes beside them between two processes: in frames, or in shared memory.

    frame 0   Envelope: where each payload lies, which ranges of the other side were read
    frame 1   the message
    frame 2.. payloads without a place, in order

A range is copied out when its message is received and acknowledged by the next message that goes
the other way. Each side owns the arena it writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from engine.errors import WireError
from engine.ipc.codec import MAX_MESSAGE_BYTES, Decoder, Encoder
from engine.ipc.shm import Arena, ArenaReader, Place

T = TypeVar("T")

MIN_ARENA_BYTES = 4096  # what is smaller is copied through a socket just as fast


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """``places``: one entry per payload, None for one that has a frame of its own."""

    places: list[Place | None]
    released: list[int]


class Delivery(NamedTuple, Generic[T]):
    """A message with its payloads."""

    message: T
    payloads: list[bytes]


class Channel(Generic[T]):
    """Packs what is sent and unpacks what comes; the socket is its user's.

    ``messages`` is the tagged union that may come in. Without arenas all payloads are frames.
    """

    def __init__(self, messages: object, own: Arena | None, theirs: ArenaReader | None) -> None:
        self._own = own
        self._theirs = theirs
        self._encoder = Encoder()
        self._decoder: Decoder[T] = Decoder(messages)
        self._envelopes: Decoder[Envelope] = Decoder(Envelope)
        self._read: list[int] = []  # generations of their ranges, not acknowledged yet

    def pack(self, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> list[bytes]:
        """Frames to send. Raises ``WireError`` for a message that cannot travel."""
        body = self._encoder.encode(message)
        longest = max(map(len, payloads), default=0)
        if longest > MAX_MESSAGE_BYTES:
            raise WireError(f"{longest} bytes cannot travel, the limit is {MAX_MESSAGE_BYTES}")
        places = [self._place(payload) for payload in payloads]
        read, self._read = self._read, []
        rest = [p for p, place in zip(payloads, places, strict=True) if place is None]
        return [self._encoder.encode(Envelope(places, read)), body, *rest]

    def unpack(self, frames: Sequence[bytes]) -> Delivery[T]:
        """The message in these frames. Raises ``WireError`` if they are invalid."""
        if len(frames) < 2:
            raise WireError(f"a message has at least two frames, this one has {len(frames)}")
        envelope = self._envelopes.decode([frames[0]])
        message = self._decoder.decode([frames[1]])
        rest = list(frames[2:])
        if sum(place is None for place in envelope.places) != len(rest):
            raise WireError(f"{len(rest)} frames of payload are not what the envelope says")
        self._acknowledged(envelope.released)
        payloads = [rest.pop(0) if p is None else self._copy(p) for p in envelope.places]
        return Delivery(message, payloads)

    def close(self) -> None:
        for arena in (self._own, self._theirs):
            if arena is not None:
                arena.close()

    def _place(self, payload: bytes) -> Place | None:
        if self._own is None or len(payload) < MIN_ARENA_BYTES:
            return None
        return self._own.put(payload)

    def _acknowledged(self, released: list[int]) -> None:
        if not released:
            return
        if self._own is None:
            raise WireError("ranges were released, but there is no shared memory")
        self._own.release(released)

    def _copy(self, place: Place) -> bytes:
        if self._theirs is None:
            raise WireError(f"{place} is in shared memory, but there is none")
        data = self._theirs.read(place)
        self._read.append(place.generation)
        return data
