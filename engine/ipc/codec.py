"""Messages to bytes and back. Any bytes give either a message or a ``WireError``."""

from __future__ import annotations

import reprlib
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from engine.errors import WireError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT = 4000  # characters of an error text, which may come from third-party code
UNFIT = (TypeError, ValueError, OverflowError, RecursionError, MemoryError)
ARRAY_HEADS = {0xDC: 3, 0xDD: 5}  # bytes of those longer than one, by the first


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
        except (msgspec.MsgspecError, *UNFIT) as error:
            raise WireError(f"not a message: {plain_text(str(error))}") from error


class Encoder:
    """Writes messages of at most ``max_bytes``, unless a call says otherwise.

    Raises ``WireError`` for values that the wire format does not have.
    """

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_refuse_object)

    def encode(self, message: msgspec.Struct, max_bytes: int | None = None) -> bytes:
        """One frame, of at most ``max_bytes`` if they are given.

        Raises ``WireError`` naming the value that cannot travel.
        """
        try:
            frame = self._encoder.encode(message)
        except UNFIT as error:
            raise WireError(f"cannot travel to another process: {error}") from error
        limit = self._max_bytes if max_bytes is None else max_bytes
        if len(frame) > limit:
            raise WireError(
                f"a message of {len(frame)} bytes cannot travel to another process, the limit is "
                f"{limit}"
            )
        return frame


def is_tagged(frame: bytes, tag: str) -> bool:
    """Does a frame begin like a message of this type? Reads no further."""
    name = tag.encode()
    begin = ARRAY_HEADS.get(frame[0], 1) if frame else 0
    return frame.startswith(
        (bytes([0xA0 | len(name)]) + name, bytes([0xD9, len(name)]) + name), begin
    )


def plain_text(text: str) -> str:
    """A text that can be sent: any text, shortened to ``MAX_TEXT`` and made valid UTF-8."""
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise WireError(f"extension type {code} is not part of the protocol")


def _refuse_object(value: object) -> NoReturn:
    raise TypeError(
        f"{reprlib.repr(value):.80} is a {type(value).__name__}; only None, booleans, numbers, "
        "strings, bytes, lists and dicts can"
    )
