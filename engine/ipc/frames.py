"""Messages over a stream socket: each batch of messages is preceded by its length in bytes."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence

import msgspec

from engine.errors import WireError
from engine.ipc.codec import MAX_MESSAGE_BYTES

LENGTH = struct.Struct("<I")
MAX_BYTES = 2 * MAX_MESSAGE_BYTES  # of messages that are sent together


def pack_frames(frames: Sequence[bytes]) -> bytes:
    """Encode a batch of messages, preceded by its length in bytes."""
    body = msgspec.msgpack.encode(frames)
    return LENGTH.pack(len(body)) + body


def read_frames(receive: Callable[[int], bytes]) -> list[bytes]:
    """Read the next batch of messages. ``receive(n)`` returns at most n bytes of the stream, b"" at
    its end.

    Raises ``EOFError`` at the end of the stream, ``WireError`` for invalid data."""
    (size,) = LENGTH.unpack(_read_exactly(receive, LENGTH.size))
    if size > MAX_BYTES:
        raise WireError(f"messages have {size} bytes, the limit is {MAX_BYTES}")
    try:
        return msgspec.msgpack.decode(_read_exactly(receive, size), type=list[bytes])
    except msgspec.MsgspecError as error:
        raise WireError(f"not a list of messages: {error}") from error


def pack_ids(token_ids: list[int]) -> bytes:
    """Encode token ids as 32-bit integers in this machine's byte order."""
    return array("i", token_ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Decode token ids from bytes. Raises ``WireError`` for an invalid length."""
    if len(data) % array("i").itemsize:
        raise WireError(f"{len(data)} bytes are not token ids of 4 bytes each")
    return array("i", data).tolist()


def _read_exactly(receive: Callable[[int], bytes], size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = receive(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the other process has closed the connection")
        data += part
    return data
