"""Reads the header of GGUF files, also of hostile ones.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, number of
tensors, number of metadata keys; the metadata; name, shape, type and offset of each tensor; then
the data. Every count and length is compared with the bytes that are left in the file before
anything of this size is allocated, so memory is bounded by the size of the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import ModelError
from engine.gguf.link import MAGIC

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 10  # llama.cpp allows 64
MAX_KEY_BYTES = 1 << 16  # limit of the format
MAX_KEYS = 1 << 16  # files have some 50
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 22  # in an array; vocabularies have up to half a million tokens and merges
MAX_HEADER_BYTES = 1 << 28
MAX_ALIGNMENT = 1 << 20
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SPLITS = 1000

NUMBERS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


class GgufTensor(NamedTuple):
    """File and byte range of one tensor."""

    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Rows first, as in torch; the file has the row length first."""
    offset: int
    """Offset of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a file, or of all parts of a split file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a file, and of the other parts if it is the first part of a split file.

    Raises ``ModelError`` with the reason if a file is missing, damaged or inconsistent."""
    parts = [read_part(file) for file in part_files(path)]
    first = parts[0]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        stated = (whole(part, "split.no", 0), whole(part, "split.count", 1) or 1)
        if stated != (number, len(parts)):
            raise damaged(
                part.path,
                f"it is part {stated[0]} (from 0) of {stated[1]} by its metadata, and part "
                f"{number} of {len(parts)} by its name",
            )
        for name in part.tensors.keys() & tensors.keys():
            raise damaged(part.path, f"the tensor {name!r:.80} is in {tensors[name].file}, too")
        tensors |= part.tensors
    stated_tensors = whole(first, "split.tensors.count", len(tensors))
    if len(parts) > 1 and stated_tensors != len(tensors):
        raise damaged(path, f"its parts have {len(tensors)} tensors, not {stated_tensors}")
    return GgufHeader(path, first.metadata, tensors)


def whole(header: GgufHeader, key: str, default: int) -> int:
    """The value of a metadata key that must be a whole number, or the default."""
    found = header.metadata.get(key, default)
    if not isinstance(found, int):
        raise damaged(header.path, f"its {key} is no whole number")
    return found


def part_files(path: Path) -> list[Path]:
    """All files of a model. path: its file, or the first of its parts. Raises ``ModelError``."""
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None:
        return [path]
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= count <= MAX_SPLITS:
        raise ModelError(f"{path} is one of {count} parts by its name, at most {MAX_SPLITS} work")
    files = [
        path.with_name(f"{found['stem']}-{nth:05d}-of-{count:05d}.gguf")
        for nth in range(1, count + 1)
    ]
    if number != 1:
        raise ModelError(f"{path} is part {number} of {count}: give the first part, {files[0]}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{path} lacks its parts {', '.join(missing[:5])}; fetch them, too")
    return files


def damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is damaged or truncated: {why}; fetch the file again")


def read_part(file: Path) -> GgufHeader:
    """Read the header of one file. Raises ``ModelError`` with the reason."""
    try:
        with file.open("rb") as stream:
            return _Reader(file, stream).header()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads values at the position of a stream and checks lengths first."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._size = file.stat().st_size
        self._left = min(self._size, MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        if self._bytes(len(MAGIC), "the magic number") != MAGIC:
            raise ModelError(f"{self._file} is no GGUF file: it does not begin with {MAGIC!r}")
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            swapped = version in [int.from_bytes(v.to_bytes(4, "big"), "little") for v in VERSIONS]
            why = "big-endian" if swapped else f"version {version}"
            raise ModelError(
                f"{self._file} is a GGUF file ({why}) that is not supported; versions 2 and 3 in "
                "little-endian order are: convert the model again with a current llama.cpp"
            )
        num_tensors = self._count("tensors", 8 + 4 + 4 + 8, MAX_TENSORS)
        num_keys = self._count("metadata keys", 8 + 4 + 1, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                raise damaged(self._file, f"the metadata key {key!r:.80} is there twice")
            metadata[key] = self._value(f"the value of {key!r:.80}")
        described = [self._described() for _ in range(num_tensors)]
        tensors = dict(self._placed(described, self._aligned(metadata)))
        return GgufHeader(self._file, metadata, tensors)

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._left:
            raise damaged(
                self._file, f"{what} has {count} bytes, the file has only {self._left} left"
            )
        content = self._stream.read(count)
        if len(content) < count:
            raise damaged(self._file, f"the file ends in {what}")
        self._left -= count
        return content

    def _number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form), what))[0])

    def _count(self, what: str, least_bytes: int, most: int) -> int:
        """Read a number of things of at least ``least_bytes`` bytes each, and check it."""
        count = self._number("<Q", f"the number of {what}")
        if count > most or count * least_bytes > self._left:
            raise damaged(self._file, f"it states {count} {what}, which cannot be in its header")
        return count

    def _string(self, what: str, most: int) -> str:
        length = self._number("<Q", f"the length of {what}")
        if length > most:
            raise damaged(self._file, f"{what} has {length} bytes, more than {most}")
        return self._bytes(length, what).decode("utf-8", errors="replace")

    def _value(self, what: str) -> Any:
        kind = self._kind(what)
        if kind is GGUFValueType.ARRAY:
            return self._array(what)
        if kind is GGUFValueType.STRING:
            return self._string(what, self._left)
        dtype = NUMBERS[kind]
        value = np.frombuffer(self._bytes(dtype.itemsize, what), dtype)[0].item()
        return bool(value) if kind is GGUFValueType.BOOL else value

    def _kind(self, what: str) -> GGUFValueType:
        kind = self._number("<I", f"the type of {what}")
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise damaged(self._file, f"{what} has the unknown type {kind}") from None

    def _array(self, what: str) -> Any:
        """A list of strings, or a numpy array."""
        kind = self._kind(what)
        if kind is GGUFValueType.ARRAY:
            raise damaged(self._file, f"{what} is an array of arrays, which is not supported")
        if kind is GGUFValueType.STRING:
            count = self._count(f"strings in {what}", 8, MAX_STRINGS)
            return [self._string(f"a string in {what}", self._left) for _ in range(count)]
        dtype = NUMBERS[kind]
        count = self._count(f"numbers in {what}", dtype.itemsize, self._left)
        values = np.frombuffer(self._bytes(count * dtype.itemsize, what), dtype)
        return values.astype(bool) if kind is GGUFValueType.BOOL else values

    def _described(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Name, type, shape and offset (from the begin of the data) of the next tensor."""
        name = self._string("the name of a tensor", MAX_NAME_BYTES)
        what = f"the tensor {name!r:.80}"
        num_dims = self._number("<I", f"the number of dimensions of {what}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise damaged(self._file, f"{what} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
        dims = [self._number("<Q", f"the shape of {what}") for _ in range(num_dims)]
        kind = self._number("<I", f"the type of {what}")
        offset = self._number("<Q", f"the offset of {what}")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(
                f"{self._file}: {what} has the type {kind}, which is unknown to the gguf package"
            ) from None
        return name, known, tuple(reversed(dims)), offset

    def _aligned(self, metadata: dict[str, Any]) -> int:
        """The alignment of tensors in bytes."""
        value = metadata.get("general.alignment", 32)
        is_valid = isinstance(value, int) and 8 <= value <= MAX_ALIGNMENT and value % 8 == 0
        if not is_valid:
            raise damaged(self._file, f"general.alignment is {value!r:.40}, not a multiple of 8")
        return int(value)

    def _placed(
        self,
        described: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]],
        alignment: int,
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Check that the tensors lie in the file and do not overlap; yield them by name."""
        begin_of_data = -(-self._stream.tell() // alignment) * alignment
        end_before, names = 0, set[str]()
        for name, kind, shape, offset in sorted(described, key=lambda each: each[3]):
            what = f"the tensor {name!r:.80}"
            if name in names:
                raise damaged(self._file, f"{what} is there twice")
            names.add(name)
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block_size or not all(shape):
                raise damaged(self._file, f"{what} of type {kind.name} has the shape {shape}")
            num_bytes = prod(shape) // block_size * block_bytes
            if offset % alignment or offset < end_before:
                raise damaged(
                    self._file,
                    f"{what} begins at byte {offset} of the data, which is in another tensor or "
                    f"no multiple of {alignment}",
                )
            end_before = offset + num_bytes
            if begin_of_data + end_before > self._size:
                raise damaged(
                    self._file,
                    f"{what} should end at byte {begin_of_data + end_before}, the file ends at "
                    f"{self._size}",
                )
            yield name, GgufTensor(self._file, kind, shape, begin_of_data + offset, num_bytes)
