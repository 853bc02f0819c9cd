"""Encodes plans and results, for a worker that is not in the scheduler's process.

A message is one msgpack array, with fields in the order of ``engine.messages.step``. A column (a
numpy array) is encoded as little-endian bytes. New fields are appended at the end.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from engine.errors import WireError
from engine.messages.step import DraftPart, MaskPart, Masks, SnapshotPart, StepPlan, StepResult
from engine.messages.vectors import PooledPart

Message = StepPlan | StepResult | Masks
T = TypeVar("T", StepPlan, StepResult, Masks)


def encode(message: Message) -> bytes:
    """Encode a message as one frame. Raises ``TypeError`` for values that cannot be encoded, and
    for columns of a wrong dtype."""
    _check_columns(message, "")
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a message of type ``kind``, with writable columns. Raises ``WireError``."""
    try:
        message: T = _DECODERS[kind].decode(data)
        return message
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error


def _check_columns(message: Any, prefix: str) -> None:
    for name, dtype in _COLUMNS[type(message)].items():
        value = getattr(message, name)
        if dtype is None:
            if value is not None:
                _check_columns(value, f"{prefix}{name}.")
        elif value is not None and (value.dtype != dtype or value.ndim != 1):
            raise TypeError(
                f"{prefix}{name} is an array of {value.dtype} with {value.ndim} dimensions, must "
                f"be of {dtype} with one dimension"
            )


def _columns_of(kind: Any) -> dict[str, np.dtype[Any] | None]:
    """The dtype of each array in a message, by field; ``None`` for a field that contains arrays."""
    found: dict[str, np.dtype[Any] | None] = {}
    for name, hint in get_type_hints(kind).items():
        for option in get_args(hint) or (hint,):
            if option in _WITH_COLUMNS:
                found[name] = None
            elif get_origin(option) is np.ndarray:
                found[name] = _dtype_of(option)
        if get_origin(hint) is np.ndarray:
            found[name] = _dtype_of(hint)
    return found


def _dtype_of(kind: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(kind)[1])[0])
    return dtype


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype.kind in "if":
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    raise TypeError(f"{value!r:.80} ({type(value).__name__}) cannot be sent to a worker")


def _from_bytes(kind: Any, data: Any) -> Any:
    if get_origin(kind) is not np.ndarray or not isinstance(data, bytes):
        raise ValueError(f"{kind} from {type(data).__name__}")
    dtype = _dtype_of(kind)
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)  # a writable copy


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise ValueError(f"extension type {code}")


_WITH_COLUMNS = (StepPlan, StepResult, Masks, DraftPart, MaskPart, SnapshotPart, PooledPart)
_COLUMNS: dict[Any, dict[str, np.dtype[Any] | None]] = {
    kind: _columns_of(kind) for kind in _WITH_COLUMNS
}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_from_bytes, ext_hook=_refuse_extension)
    for kind in (StepPlan, StepResult, Masks)
}
