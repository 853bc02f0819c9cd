"""Reads LoRA adapters from directories in peft's format, or takes them from memory.

Files are not trusted: all names, sizes and shapes are checked before tensors are read, and pickles
are never opened."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import reason_of
from engine.lora.adapter import Adapter, AdapterError, LowRank, LowRankExperts, LowRankTable
from engine.lora.peft_config import CONFIG, PeftConfig, load_json, parse_config
from engine.lora.peft_names import Arrangement, Part, Shape, arrange
from engine.lora.turns import give_way

WEIGHTS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
MAX_METADATA = 10_000  # objects of a header that are no tensors
PIECE_BYTES = 1 << 18  # read or hashed at once
ALIGNED = 64  # bytes; each tensor begins at a multiple
MEMORY = "the tensors"  # what messages call an adapter from memory


class Limits(NamedTuple):
    """What an adapter may be at most; 0: no limit."""

    rank: int = 0  # ``max_lora_rank``
    num_bytes: int = 0


class Stored(NamedTuple):
    """One tensor of a file."""

    dtype: str
    shape: Shape
    begin: int  # of its bytes, after the header
    end: int


def read_adapter(
    path: str | Path, name: str, *, within: Path | None = None, limits: Limits | None = None
) -> Adapter:
    """Read an adapter from a directory with adapter_config.json and adapter_model.safetensors.

    within: a directory that contains all that is read, links followed; by default that of the
    adapter itself, or of its repository if a hub's client stored it. Raises ``AdapterError``, which
    names the adapter, for files that are missing, damaged, too large or not supported."""
    limits = limits or Limits()
    try:
        root = _root(Path(path), within)
        config = parse_config(load_json(_read_all(root / CONFIG, root, within), CONFIG))
        with _opened(root / WEIGHTS, root, within) as file:
            stored, start = read_header(file, WEIGHTS)
            shapes = {key: one.shape for key, one in stored.items()}
            arrangement = arrange(shapes, config, WEIGHTS)
            used = {key: stored[key] for key in arrangement.names()}
            _check_limits(arrangement, sum(one.end - one.begin for one in used.values()), limits)
            tensors = _read_tensors(file, start, used)
        return _adapter(arrangement, config, tensors, name=name, path=str(path))
    except OSError as error:
        raise AdapterError(f"adapter {name!r} at {path}: {reason_of(error)}") from error
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r} at {path}: {error}") from error


def adapter_of(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    name: str,
    *,
    limits: Limits | None = None,
) -> Adapter:
    """An adapter from tensors by the names of peft's files, and the object of its
    adapter_config.json. The tensors are copied. Raises ``AdapterError`` as ``read_adapter``."""
    try:
        parsed = parse_config(config)
        for key, tensor in tensors.items():
            if tensor.dtype not in DTYPES.values():
                raise AdapterError(f"{key} is of type {tensor.dtype}; {_types()}")
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        arrangement = arrange(shapes, parsed, MEMORY)
        used = {key: tensors[key] for key in arrangement.names()}
        _check_limits(arrangement, sum(t.nbytes for t in used.values()), limits or Limits())
        copies = {
            key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in used.items()
        }
        return _adapter(arrangement, parsed, copies, name=name, path="")
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r}: {error}") from error


def _adapter(
    arrangement: Arrangement,
    config: PeftConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    name: str,
    path: str,
) -> Adapter:
    modules = {
        where: LowRank(
            tensors[part.names["a"]],
            tensors[part.names["b"]],
            part.scale,
            _optional(part, "bias", tensors),
            _optional(part, "magnitude", tensors),
        )
        for where, part in arrangement.modules.items()
    }
    tables = {
        where: LowRankTable(
            tensors[part.names["table_a"]],
            tensors[part.names["table_b"]],
            part.scale,
            _optional(part, "magnitude", tensors),
        )
        for where, part in arrangement.tables.items()
    }
    return Adapter(
        name=name,
        path=path,
        digest=_digest(arrangement, config, tensors),
        modules=modules,
        tables=tables,
        experts={
            where: _experts(tensors[part.names["a"]], tensors[part.names["b"]], part)
            for where, part in arrangement.experts.items()
        },
        replaced={where: tensors[key] for where, key in arrangement.replaced.items()},
        ties_weights=config.ties_weights,
        base=config.base,
    )


def _optional(part: Part, role: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    return tensors[part.names[role]] if role in part.names else None


def _experts(a: torch.Tensor, b: torch.Tensor, part: Part) -> LowRankExperts:
    """Split what peft stores as one product: the rows of ``a`` by experts, then by ranks, the
    columns of ``b`` by ranks, then by experts."""
    experts = a.shape[0] // part.rank
    return LowRankExperts(
        a.view(experts, part.rank, a.shape[1]),
        b.view(b.shape[0], part.rank, experts).permute(2, 0, 1),
        part.scale,
    )


def _digest(
    arrangement: Arrangement, config: PeftConfig, tensors: Mapping[str, torch.Tensor]
) -> str:
    """sha256 of what changes results: paths, scales, types, shapes and bytes."""
    total = hashlib.sha256(f"1 {config.ties_weights}".encode())
    kinds = (arrangement.modules, arrangement.tables, arrangement.experts)
    for kind, parts in enumerate(kinds):
        for path, part in sorted(parts.items()):
            total.update(f"\n{kind} {path} {part.scale!r}".encode())
            for role, key in sorted(part.names.items()):
                _add(total, role, tensors[key])
    for path, key in sorted(arrangement.replaced.items()):
        _add(total, path, tensors[key])
    return total.hexdigest()


def _add(total: hashlib._Hash, what: str, tensor: torch.Tensor) -> None:
    total.update(f"\n{what} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    data = tensor.view(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(data), PIECE_BYTES):
        total.update(data[begin : begin + PIECE_BYTES])
        give_way()


def _check_limits(arrangement: Arrangement, num_bytes: int, limits: Limits) -> None:
    parts = {**arrangement.modules, **arrangement.tables, **arrangement.experts}
    rank = max((part.rank for part in parts.values()), default=0)
    if limits.rank and rank > limits.rank:
        path = next(path for path, part in parts.items() if part.rank == rank)
        raise AdapterError(
            f"it has rank {rank} (in {path}), above max_lora_rank = {limits.rank}; start the "
            f"engine with max_lora_rank={rank}"
        )
    if limits.num_bytes and num_bytes > limits.num_bytes:
        raise AdapterError(
            f"its tensors have {num_bytes} bytes, {limits.num_bytes} bytes are left for adapters"
        )


def _types() -> str:
    return f"tensors must be one of {', '.join(DTYPES)}"


# Files


def _root(path: Path, within: Path | None) -> Path:
    """The directory of an adapter. Raises ``AdapterError`` for one that may not be read."""
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise AdapterError(
            f"{path} {what}; name a directory with {CONFIG} and {WEIGHTS}, as peft's "
            "save_pretrained writes it"
        )
    if within is not None and not path.resolve().is_relative_to(within.resolve()):
        raise AdapterError(f"{path} is not in {within}; only adapters in that directory are read")
    return path


def _allowed(root: Path, within: Path | None) -> Path:
    """The directory that all files of an adapter must be in, links followed."""
    if within is not None:
        return within.resolve()
    snapshots = root.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
        return snapshots.parent.resolve()  # where a hub's client stores what the links point to
    return root.resolve()


@contextmanager
def _opened(file: Path, root: Path, within: Path | None) -> Iterator[int]:
    """The descriptor of a regular file, which is closed at the end."""
    if not os.path.lexists(file):
        raise _missing(file, root)
    allowed = _allowed(root, within)
    if not (target := file.resolve()).is_relative_to(allowed):
        raise AdapterError(f"{file.name} is a link to {target}, which is not in {allowed}")
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    number = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise AdapterError(f"{file.name} is not a regular file")
        yield number
    finally:
        os.close(number)


def _missing(file: Path, root: Path) -> AdapterError:
    if file.name == WEIGHTS:
        for pickle in PICKLES:
            if os.path.lexists(root / pickle):
                return AdapterError(
                    f"it has only pickled weights ({pickle}), which can run code when loaded; save "
                    "it again with peft's save_pretrained(path, safe_serialization=True)"
                )
    return AdapterError(
        f"{file.name} is missing; an adapter is a directory with {CONFIG} and {WEIGHTS}, as "
        "peft's save_pretrained writes it"
    )


def _read_all(file: Path, root: Path, within: Path | None) -> bytes:
    """All bytes of a small file."""
    with _opened(file, root, within) as number:
        size = os.fstat(number).st_size
        if size > MAX_CONFIG_BYTES:
            raise AdapterError(
                f"{file.name} has {size} bytes, the limit is {MAX_CONFIG_BYTES}; it is not a "
                "configuration of peft"
            )
        return os.read(number, size)


def read_header(file: int, name: str) -> tuple[dict[str, Stored], int]:
    """The tensors of an open safetensors file by name, and the offset of their bytes.

    Raises ``AdapterError`` unless the tensors fill the file without gaps or overlaps."""
    size = os.fstat(file).st_size
    prefix = os.pread(file, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= size - 8:
        raise AdapterError(f"{name} has {size} bytes and no valid header: it is truncated")
    if length > MAX_HEADER_BYTES:
        raise AdapterError(
            f"the header of {name} has {length} bytes, the limit is {MAX_HEADER_BYTES}"
        )
    give_way()
    stored = {key: _checked(key, one, name) for key, one in _entries(file, length, name).items()}
    give_way()
    end = 0
    for key, one in sorted(stored.items(), key=lambda item: item[1].begin):
        if one.begin != end:
            raise AdapterError(f"{key} in {name} begins at byte {one.begin}, should at {end}")
        end = one.end
    if 8 + length + end != size:
        raise AdapterError(
            f"{name} has {size} bytes, its header describes {8 + length + end}: it is truncated or "
            "damaged"
        )
    return stored, 8 + length


class _Entry(msgspec.Struct):
    """What a header tells of one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _entries(file: int, length: int, name: str) -> dict[str, _Entry]:
    """The entries of a header of this many bytes."""
    header = os.pread(file, length, 8)
    # Objects and lists of an entry: anything else would take many times its size in memory.
    most = header.count(b'"dtype"') + MAX_METADATA
    if header.count(b"{") > most or header.count(b"[") > 2 * most or header.count(b":") > 4 * most:
        raise AdapterError(f"the header of {name} describes more than tensors")
    try:
        found = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        return {key: msgspec.json.decode(raw, type=_Entry) for key, raw in found.items()}
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise AdapterError(f"the header of {name} is not valid: {error}") from error


def _checked(key: str, entry: _Entry, name: str) -> Stored:
    """One tensor, whose type is known and whose size is that of its shape."""
    shape, (begin, end) = tuple(entry.shape), entry.data_offsets
    if entry.dtype not in DTYPES:
        raise AdapterError(f"{key} in {name} is of type {entry.dtype}; {_types()}")
    if not all(0 <= size < 1 << 48 for size in (*shape, begin, end)) or len(shape) > 8:
        raise AdapterError(f"the header of {name} has no valid entry for {key}")
    num_bytes = prod(shape) * DTYPES[entry.dtype].itemsize
    if end - begin != num_bytes:
        raise AdapterError(
            f"{key} in {name} has {end - begin} bytes, its shape {list(shape)} {num_bytes}"
        )
    return Stored(entry.dtype, shape, begin, end)


def _read_tensors(file: int, start: int, used: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Read tensors into one piece of memory. start: offset of the bytes of all tensors."""
    places, size, runs = {}, 0, list[list[int]]()
    for key, one in sorted(used.items(), key=lambda item: item[1].begin):
        places[key] = size
        if runs and [one.begin, size] == [runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]]:
            runs[-1][2] += one.end - one.begin
        else:
            runs.append([one.begin, size, one.end - one.begin])
        size += -(-(one.end - one.begin) // ALIGNED) * ALIGNED
    try:
        whole = np.empty(size, np.uint8)
    except MemoryError as error:
        raise AdapterError(f"there is no memory for its {size} bytes") from error
    for begin, place, num_bytes in runs:
        _fill(file, start + begin, whole[place : place + num_bytes])
    memory = torch.from_numpy(whole)
    return {
        key: memory[places[key] : places[key] + one.end - one.begin]
        .view(DTYPES[one.dtype])
        .view(one.shape)
        for key, one in used.items()
    }


def _fill(file: int, at: int, out: NDArray[np.uint8]) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(file, [out[done : done + PIECE_BYTES].data], at + done)
        if not count:
            raise AdapterError(f"{WEIGHTS} ended while it was read")
        done += count
        give_way()
