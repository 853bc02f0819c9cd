"""Messages to bytes and back. Whatever bytes come in, a message or ``WireError`` comes out."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from engine.errors import WireError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20


class Decoder(Generic[T]):
    """Reads messages of one tagged union, from the one frame that each of them is."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            messages, ext_hook=_refuse_extension
        )

    def decode(self, frames: list[bytes]) -> T:
        """The message. Raises ``WireError`` saying what is wrong with it."""
        if len(frames) != 1:
            raise WireError(f"a message is one frame, this one has {len(frames)}")
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
            raise WireError(f"not a message: {error}") from error


class Encoder:
    """Writes messages. Raises ``WireError`` for what has no place on the wire."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_refuse_object)

    def encode(self, message: msgspec.Struct) -> bytes:
        """One frame. Raises ``WireError`` naming the value that cannot travel."""
        try:
            frame = self._encoder.encode(message)
        except (TypeError, OverflowError, RecursionError, ValueError) as error:
            raise WireError(f"cannot travel to another process: {error}") from error
        if len(frame) > MAX_MESSAGE_BYTES:
            raise WireError(
                f"a message of {len(frame)} bytes cannot travel to another process, the limit is "
                f"{MAX_MESSAGE_BYTES}"
            )
        return frame


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise WireError(f"extension type {code} is not part of the protocol")


def _refuse_object(value: object) -> NoReturn:
    raise TypeError(
        f"{value!r:.80} is a {type(value).__name__}; only None, booleans, numbers, strings, bytes, "
        "lists and dicts can"
    )
