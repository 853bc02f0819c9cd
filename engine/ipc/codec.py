"""Encodes and decodes messages. Decoding arbitrary bytes gives a message or a ``WireError``."""

from __future__ import annotations

import reprlib
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from engine.errors import WireError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT = 4000  # characters of an error text, which may be from third-party code
UNFIT = (TypeError, ValueError, OverflowError, RecursionError, MemoryError)
ARRAY_HEADS = {0xDC: 3, 0xDD: 5}  # length of array headers longer than a byte, by first byte


class MessageDecoder(Generic[T]):
    """Decodes the messages of one tagged union. A message is one frame."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            messages, ext_hook=_refuse_extension
        )

    def decode(self, frames: list[bytes]) -> T:
        """Decode a message. Raises ``WireError`` if the frames are not one of the union's
        messages."""
        if len(frames) != 1:
            raise WireError(f"the message has {len(frames)} frames, must have one")
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, *UNFIT) as error:
            raise WireError(f"not a message: {plain_text(str(error))}") from error


class MessageEncoder:
    """Encodes messages of at most ``max_bytes`` by default.

    Raises ``WireError`` for values that the format does not support."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_refuse_object)

    def encode(self, message: msgspec.Struct, max_bytes: int | None = None) -> bytes:
        """Encode a message as one frame of at most ``max_bytes``; ``None``: the encoder's limit.

        Raises ``WireError`` for a value that cannot be encoded, or a message that is too long."""
        try:
            frame = self._encoder.encode(message)
        except UNFIT as error:
            raise WireError(f"cannot be sent to another process: {error}") from error
        limit = self._max_bytes if max_bytes is None else max_bytes
        if len(frame) > limit:
            raise WireError(
                f"a message of {len(frame)} bytes cannot be sent to another process, the limit is "
                f"{limit}"
            )
        return frame


def is_tagged(frame: bytes, tag: str) -> bool:
    """True if a frame begins like a message with this tag; the rest of the frame is not checked."""
    name = tag.encode()
    begin = ARRAY_HEADS.get(frame[0], 1) if frame else 0
    return frame.startswith(
        (bytes([0xA0 | len(name)]) + name, bytes([0xD9, len(name)]) + name), begin
    )


def plain_text(text: str) -> str:
    """Shorten a text to ``MAX_TEXT`` characters and make it valid UTF-8."""
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise WireError(f"extension type {code} is not part of the protocol")


def _refuse_object(value: object) -> NoReturn:
    raise TypeError(
        f"{reprlib.repr(value):.80} is a {type(value).__name__}, must be None, a boolean, number, "
        "string, bytes, list or dict"
    )
