"""Reads safetensors files directly into the destination tensors.

Files are read, not memory-mapped, because mapped pages would count as memory of the process in
addition to the weights. The format: an 8-byte length, a JSON header, then the data
(https://github.com/huggingface/safetensors)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from engine.config.model import read_json
from engine.errors import ModelError
from engine.layers.quantized import StoredWeight
from engine.models.file_reader import FileReader
from engine.models.targets import TargetPart

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Types of quantised weights, which are read as whole tensors without conversion.
STORED_DTYPES = {
    **DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
MAX_HEADER_BYTES = 100_000_000  # limit of the format
STAGING_BYTES = 1 << 20  # fits into a core's cache
LEAST_SEGMENT = 4096  # bytes of adjacent columns that are read alone
INDEX = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """File and byte range of one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int


class Checkpoint:
    """The tensors of a model directory by name. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        """Read all headers. Raises ``ModelError`` for files that are missing or damaged."""
        self.root = root
        self.tensors: dict[str, StoredTensor] = {}
        files = find_files(root)
        for file in files:
            self.tensors.update(read_header(file))
        self._files = FileReader(files)
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)

    @property
    def quantized_types(self) -> list[str]:
        """Names of the types of quantised tensors, as far as the file format has such types."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous, on the CPU) with elements of a tensor from index ``start`` on,
        converted to the dtype of ``out``. Raises ``ModelError`` for a type that is not a float."""
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise ModelError(
                f"{name} in {stored.file} is of type {stored.dtype}; weights must be one of "
                f"{', '.join(DTYPES)}, or quantized as the quantization_config of config.json "
                "describes"
            )
        dtype, flat = DTYPES[stored.dtype], out.view(-1)
        offset = stored.offset + start * dtype.itemsize
        if dtype == out.dtype:
            self._fill(stored.file, offset, flat)
            return
        staging = self._staging.view(dtype)
        for begin in range(0, flat.numel(), staging.numel()):
            piece = flat[begin : begin + staging.numel()]
            unconverted = staging[: piece.numel()]
            self._fill(stored.file, offset + begin * dtype.itemsize, unconverted)
            piece.copy_(unconverted)

    def read_part(self, part: TargetPart, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous, on the CPU) with a part of a decoder's tensor, converted to the
        dtype of ``out``. Raises ``ModelError`` as ``read``."""
        if part.columns is None:
            self.read(part.name, part.start, out)
            return
        rows = Rows(out.view(part.num_rows, -1), part.shape[-1], part.columns)
        rows.fill(
            lambda first, piece: self.read(part.name, part.start + first, piece),
            in_segments=self._has_segments(part),
        )

    def _has_segments(self, part: TargetPart) -> bool:
        """True if the columns of a part are read alone, row by row."""
        kind = DTYPES.get(self.tensors[part.name].dtype)
        return kind is not None and part.num_columns * kind.itemsize >= LEAST_SEGMENT

    def column_unit(self, part: TargetPart) -> int:
        """Number of adjacent columns that are stored together."""
        return 1

    def is_packed(self, part: TargetPart) -> bool:
        """True if the checkpoint itself, without a quantization_config, says that a part of a
        decoder's tensor is quantised; then ``quantized`` reads it."""
        return False

    def quantized(self, parts: Sequence[TargetPart], dtype: torch.dtype) -> list[StoredWeight]:
        """Read parts of one target for which ``is_packed`` is true, and join adjacent ones where
        that is possible. dtype: that of the dequantised weights."""
        raise NotImplementedError

    def main_dtype(self) -> torch.dtype | None:
        """The most frequent floating-point dtype, by number of elements; ``None`` if there is
        none."""
        sizes = dict.fromkeys(DTYPES, 0)
        for stored in self.tensors.values():
            if stored.dtype in sizes:
                sizes[stored.dtype] += stored.num_bytes // DTYPES[stored.dtype].itemsize
        most = max(sizes, key=lambda name: sizes[name])
        return DTYPES[most] if sizes[most] else None

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor without conversion; its type must be one of ``STORED_DTYPES``."""
        stored = self.tensors[name]
        out = torch.empty(stored.shape, dtype=STORED_DTYPES[stored.dtype])
        if out.numel():
            self._fill(stored.file, stored.offset, out.view(-1))
        return out

    def entries(self, name: str, ranges: Sequence[range]) -> torch.Tensor:
        """Read ranges of a tensor of at most two dimensions along each of them, without
        conversion."""
        stored = self.tensors[name]
        if len(ranges) != 2 or not all(stored.shape):
            whole = self.tensor(name)
            return whole[tuple(slice(one.start, one.stop) for one in ranges)].contiguous()
        rows, columns = ranges
        out = torch.empty((len(rows), len(columns)), dtype=STORED_DTYPES[stored.dtype])
        size = out.element_size()
        row_bytes = stored.shape[1] * size
        mine = range(columns.start * size, columns.stop * size)
        offset, data = stored.offset + rows.start * row_bytes, out.view(torch.uint8)
        if len(mine) == row_bytes:
            self._fill(stored.file, offset, out)
        else:
            self.read_bytes(stored.file, offset, row_bytes, mine, data)
        return out

    def entry(self, name: str, index: int) -> torch.Tensor:
        """Read entry ``index`` of a tensor's first dimension without conversion."""
        stored = self.tensors[name]
        out = torch.empty(stored.shape[1:], dtype=STORED_DTYPES[stored.dtype])
        if out.numel():
            self._fill(stored.file, stored.offset + index * out.nbytes, out.view(-1))
        return out

    def same(self, one: str, other: str) -> bool:
        """True if two tensors have the same type, shape and values."""
        a, b = self.tensors[one], self.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        for begin in range(0, a.num_bytes, STAGING_BYTES):
            size = min(STAGING_BYTES, a.num_bytes - begin)
            left, right = torch.empty(2, size, dtype=torch.uint8)
            self._fill(a.file, a.offset + begin, left)
            self._fill(b.file, b.offset + begin, right)
            if not torch.equal(left, right):
                return False
        return True

    def read_bytes(
        self, file: Path, offset: int, row_bytes: int, mine: range, out: torch.Tensor
    ) -> None:
        """Fill ``out`` [rows, bytes] uint8 with a range of the bytes of each row of a file's part,
        whose rows have ``row_bytes``; ``offset``: of the first row."""
        Rows(out, row_bytes, mine).fill(
            lambda first, piece: self._fill(file, offset + first, piece),
            in_segments=len(mine) >= LEAST_SEGMENT,
        )

    def _fill(self, file: Path, offset: int, out: torch.Tensor) -> None:
        try:
            self._files.fill(file, offset, out.view(-1).view(torch.uint8).numpy())
        except EOFError as error:
            raise damaged(file, "it ended while it was read") from error


class Rows(NamedTuple):
    """Rows whose columns are to be filled with those of a stored matrix."""

    out: torch.Tensor  # [rows, columns]
    width: int  # columns that a row has where it is stored
    columns: range

    def fill(self, read: Callable[[int, torch.Tensor], None], *, in_segments: bool) -> None:
        """read: fills a tensor with stored numbers from this one on. in_segments: whether it reads
        only these columns, row by row. A disk reads whole pages, so that short segments are rather
        cut from whole rows."""
        first, last = self.columns.start, self.columns.stop
        if in_segments:
            for index, row in enumerate(self.out):
                read(index * self.width + first, row)
            return
        at_once = max(1, STAGING_BYTES // (self.width * self.out.element_size()))
        for begin in range(0, len(self.out), at_once):
            piece = self.out[begin : begin + at_once]
            whole = piece.new_empty((len(piece), self.width))
            read(begin * self.width, whole)
            piece.copy_(whole[:, first:last])


def find_files(root: Path) -> list[Path]:
    """The safetensors files of a model directory; if it has an index file, those listed there."""
    index = read_json(root / INDEX)
    if index is not None:
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise damaged(root / INDEX, "its weight_map names no files")
        files = sorted({root / str(name) for name in places.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(
                f"{root / INDEX} names {', '.join(missing)}, missing in {root}; fetch these files"
            )
    elif (root / "model.safetensors").is_file():
        files = [root / "model.safetensors"]
    else:
        # Some directories also contain the weights in Mistral's format.
        found = sorted(root.glob("*.safetensors"))
        files = [file for file in found if not file.name.startswith("consolidated")]
    if not files:
        raise no_weights(root)
    return files


def no_weights(root: Path) -> ModelError:
    pickles = [f.name for kind in ("*.bin", "*.pt", "*.pth") for f in sorted(root.glob(kind))]
    if pickles:
        return ModelError(
            f"{root} has only pickled weights ({pickles[0]}), which can run code when loaded; "
            "convert them once with transformers: AutoModelForCausalLM.from_pretrained(path)"
            ".save_pretrained(new_path, safe_serialization=True)"
        )
    return ModelError(
        f"{root} has no *.safetensors files; give a complete model directory, or "
        'load_format="dummy" for random weights'
    )


def damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is damaged or truncated: {why}; fetch the file again")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises ``ModelError`` if the file is damaged."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise damaged(file, f"it has {size} bytes and no valid header")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise damaged(file, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return dict(_entries(file, header, 8 + length, size))


def _entries(
    file: Path, header: dict[str, Any], start: int, size: int
) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(file, f"its header has no valid entry for {name}") from error
        if not 0 <= begin <= end <= size - start:
            raise damaged(file, f"{name} should end at byte {start + end}, the file ends at {size}")
        known = STORED_DTYPES.get(dtype)
        if known and end - begin != torch.Size(shape).numel() * known.itemsize:
            raise damaged(file, f"{name} has {end - begin} bytes, not those of its shape {shape}")
        yield name, StoredTensor(file, dtype, shape, start + begin, end - begin)
