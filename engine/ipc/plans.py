"""Plans and results as bytes, for a worker that is not in the scheduler's process.

A message is one msgpack array, its fields in the order of ``engine.messages.step``; a column is its
entries as little-endian bytes. Fields are only appended; ``tests/golden`` keeps the bytes.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from engine.errors import WireError
from engine.messages.step import Masks, StepPlan, StepResult

Message = StepPlan | StepResult | Masks
T = TypeVar("T", StepPlan, StepResult, Masks)


def encode(message: Message) -> bytes:
    """The message as one frame. Raises ``TypeError`` for a value that has no place on a wire."""
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message of this kind; its columns may be written to. Raises ``WireError``."""
    try:
        message: T = _DECODERS[kind].decode(data)
        return message
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype.kind == "i":
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    raise TypeError(f"{value!r:.80} ({type(value).__name__}) cannot travel to a worker")


def _from_bytes(kind: Any, data: Any) -> Any:
    if get_origin(kind) is not np.ndarray or not isinstance(data, bytes):
        raise ValueError(f"{kind} from {type(data).__name__}")
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)  # a copy: it may be written


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise ValueError(f"extension type {code}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_from_bytes, ext_hook=_refuse_extension)
    for kind in (StepPlan, StepResult, Masks)
}
