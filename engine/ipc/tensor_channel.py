"""Messages with tensors between two processes, whichever way the tensors go.

    process A                                        process B
    TensorChannel ── frames: message, parcels ─────> TensorChannel ── tensors of its own
         ▲      bytes of tensors as frames or in the arena, or handles of device memory
         └────────── the loans B has read, with its next message ───────────┘

Made of a ``Channel``, which has frames and arena, and a ``TensorSender`` and a
``TensorReceiver``, which have the device. The socket is its user's, as with ``Channel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from engine.errors import WireError
from engine.ipc.channel import Channel
from engine.ipc.codec import Decoder, Encoder
from engine.ipc.tensors import Parcel, TensorReceiver, TensorSender

T = TypeVar("T")


class Freight(msgspec.Struct, array_like=True, frozen=True):
    """First payload of every message: its tensors, and the loans of the other side that were
    read."""

    parcels: list[Parcel]
    read: list[int]


class TensorDelivery(NamedTuple, Generic[T]):
    """A message with its tensors."""

    message: T
    tensors: list[Any]


class TensorChannel(Generic[T]):
    """Packs what is sent and unpacks what comes, one process to one other."""

    def __init__(self, channel: Channel[T], sender: TensorSender, receiver: TensorReceiver) -> None:
        self._channel = channel
        self._sender = sender
        self._receiver = receiver
        self._encoder = Encoder()
        self._freights: Decoder[Freight] = Decoder(Freight)
        self._read: list[int] = []  # not acknowledged yet

    def pack(self, message: msgspec.Struct, tensors: Sequence[Any] = ()) -> list[bytes]:
        """Frames to send. Raises ``WireError`` for what cannot travel; nothing is lent then."""
        packed = []
        try:
            for tensor in tensors:
                packed.append(self._sender.pack(tensor))
            self._read += self._receiver.take_read()
            freight = self._encoder.encode(Freight([each.parcel for each in packed], self._read))
            payloads = [each.payload for each in packed if not each.parcel.handle]
            frames = self._channel.pack(message, [freight, *payloads])
        except WireError:
            self._sender.release(each.parcel.loan for each in packed if each.parcel.loan)
            raise
        self._read = []
        return frames

    def unpack(self, frames: Sequence[bytes]) -> TensorDelivery[T]:
        """The message in these frames. Raises ``WireError`` if they are invalid."""
        message, payloads = self._channel.unpack(frames)
        if not payloads:
            raise WireError("a message says nothing of its tensors")
        freight = self._freights.decode([payloads[0]])
        self._sender.release(freight.read)
        rest = payloads[1:]
        if sum(not parcel.handle for parcel in freight.parcels) != len(rest):
            raise WireError(f"{len(rest)} payloads are not what the tensors' parcels say")
        tensors: list[Any] = []
        wrong: WireError | None = None
        for parcel in freight.parcels:
            try:
                tensors.append(self._receiver.unpack(parcel, b"" if parcel.handle else rest.pop(0)))
            except WireError as error:  # the loans of the others end all the same
                wrong = wrong or error
        if wrong is not None:
            raise wrong
        return TensorDelivery(message, tensors)

    def close(self) -> None:
        """Let go of the other side's memory. Our own stays until ``num_lent`` of the sender is 0,
        or the other side has ended."""
        self._receiver.close()
        self._channel.close()
