"""Provides the tensors of a decoder, read from a checkpoint or random, in the compute dtype."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import lcm, prod
from typing import Protocol, Self

import torch

from engine.errors import ModelError
from engine.layers.quantized import QuantizedWeight, StoredWeight, Weight, stack
from engine.models.checkpoint import Checkpoint
from engine.models.kv_scales import is_kv_scale
from engine.models.quant.fields import Format
from engine.models.quant.modules import QuantizedModules
from engine.models.targets import Target, TargetPart
from kernels.pages import allocate

# Tensors in older checkpoints that can be derived from config.json.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
# Parts that generate no text from text: the encoder of images, and layers that only draft tokens.
UNREAD = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|connector)\."
    r"|^(model\.)?image_newline$|^mtp\."
)
HEAD = "lm_head.weight"
# Targets read in advance, so that reading overlaps packing.
READ_AHEAD = 2
# Numbers of quantised targets read in advance. While such a target is packed it takes up to two
# bytes for each number, so large ones are read one at a time. Those of GGUF files are not, since
# before and while they are packed they take as much memory as afterwards.
PACKED_AHEAD = 16 << 20


class WeightSource(Protocol):
    """A source of weights: loads the tensor of each target."""

    def load(self, target: Target, dtype: torch.dtype) -> Weight:
        """Load a target as a new tensor of its ``shape`` on the CPU, or in quantised form."""
        ...


class Weights:
    """Context manager with the tensors of a decoder. Take each tensor once, in the order of
    ``targets``, since a thread reads the next ones in advance."""

    def __init__(
        self,
        targets: Iterable[Target],
        source: WeightSource,
        dtype: torch.dtype,
        *,
        most_ahead: int | None = None,
    ) -> None:
        """most_ahead: largest total of the numbers in targets that are read in advance, that of the
        target taken included; ``None``: any."""
        self._most_ahead = most_ahead
        self._targets = deque(targets)
        self._source = source
        self.dtype = dtype
        self._ready: dict[str, Future[Weight]] = {}
        self._numbers: dict[str, int] = {}  # of each target in `_ready`
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.shutdown(cancel_futures=True)

    def take(self, name: str) -> Weight:
        """Take the tensor of a target, on the CPU. No reference to it is kept."""
        while self._targets and (name not in self._ready or self._may_read_ahead()):
            following = self._targets.popleft()
            dtype = torch.float32 if following.is_float32 else self.dtype
            loading = self._reader.submit(self._source.load, following, dtype)
            self._ready[following.name] = loading
            self._numbers[following.name] = prod(following.shape)
        del self._numbers[name]
        return self._ready.pop(name).result()

    def _may_read_ahead(self) -> bool:
        total = sum(self._numbers.values()) + prod(self._targets[0].shape)
        is_small = self._most_ahead is None or total <= self._most_ahead
        return len(self._ready) <= READ_AHEAD and is_small


class StoredWeights:
    """Reads the decoder's tensors (targets) from a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: Iterable[Target],
        form: Format | None = None,
        unread: re.Pattern[str] = UNREAD,
    ) -> None:
        """Match targets with the checkpoint's tensors, before any is read. Raises ``ModelError``
        for tensors that are missing, unused or of another shape.

        form: the format of quantised modules, if there are any; unread: names of tensors that the
        model does not use."""
        self._unread = unread
        self._checkpoint = checkpoint
        self._modules = None if form is None else QuantizedModules(checkpoint, form)
        targets = tuple(targets)
        self._parts = {target.name: self._choose(target, targets) for target in targets}
        used = {name for parts in self._parts.values() for p in parts for name in self._names(p)}
        self._check_left_over(used)

    @property
    def sources(self) -> dict[str, tuple[TargetPart, ...]]:
        """The checkpoint tensors, or ranges of them, that fill each target, by its name."""
        return dict(self._parts)

    def is_quantized(self, target: Target) -> bool:
        """True if any part of a target is stored in quantised form."""
        return any(map(self._is_quantized, self._parts[target.name]))

    def column_unit(self, target: Target) -> int:
        """Number of adjacent columns of a target that are stored together."""
        return lcm(*map(self._unit, self._parts[target.name]))

    def num_bytes(self, target: Target, dtype: torch.dtype) -> float:
        """Bytes of a whole target in memory: as stored if it is quantised, or else in ``dtype``."""
        return sum(
            self._packed_bytes(part) if self._is_quantized(part) else part.size * dtype.itemsize
            for part in self._parts[target.name]
        )

    def _packed_bytes(self, part: TargetPart) -> float:
        stored = [self._checkpoint.tensors[name].num_bytes for name in self._names(part)]
        return sum(stored) * part.size / prod(part.shape)

    def _unit(self, part: TargetPart) -> int:
        if self._modules is not None and self._modules.holds(part):
            return self._modules.column_unit(part)
        return self._checkpoint.column_unit(part)

    def load(self, target: Target, dtype: torch.dtype) -> Weight:
        parts = target.parts_of(self._parts[target.name])
        if self.is_quantized(target):
            if all(map(self._checkpoint.is_packed, parts)):
                return stack(self._checkpoint.quantized(parts, dtype))
            return stack(self._each(parts, dtype))
        out = allocate(target.shape, dtype)
        self._fill(parts, out)
        return out

    def _is_quantized(self, part: TargetPart) -> bool:
        is_module = self._modules is not None and self._modules.holds(part)
        return is_module or self._checkpoint.is_packed(part)

    def _each(self, parts: Sequence[TargetPart], dtype: torch.dtype) -> list[StoredWeight]:
        """Read the parts of a target, in their quantised form if the checkpoint stores them so."""
        read: dict[tuple[str, range], StoredWeight] = {}  # parts may be adjacent rows of a module
        found: list[StoredWeight] = []
        for part in parts:
            if self._modules is None or not self._modules.holds(part):
                found.append(self._one(part, dtype))
                continue
            mine = rows_of(part)
            others = [rows_of(one) for one in parts if one.name == part.name]
            rows = next(one for one in merged(others) if one.start <= mine.start < one.stop)
            if (part.name, rows) not in read:
                read[part.name, rows] = self._modules.read(part, rows, dtype)
            weight = read[part.name, rows]
            if rows != mine:
                assert isinstance(weight, QuantizedWeight), "a part with columns has all their rows"
                weight = weight.rows(mine.start - rows.start, len(mine))
            found.append(weight)
        return found

    def _one(self, part: TargetPart, dtype: torch.dtype) -> StoredWeight:
        """Read one part of a target, whose tensor is not that of a quantised module."""
        if self._checkpoint.is_packed(part):
            return self._checkpoint.quantized((part,), dtype)[0]
        # A part may be the matrix of one expert in a tensor of several.
        out = allocate((part.num_rows, part.num_columns), dtype)
        self._fill((part,), out)
        return out

    def _fill(self, parts: Iterable[TargetPart], out: torch.Tensor) -> None:
        flat, filled = out.view(-1), 0
        for part in parts:
            size = part.size if part.columns is None else part.num_rows * part.num_columns
            self._checkpoint.read_part(part, flat[filled : filled + size])
            filled += size

    def _choose(self, target: Target, targets: Iterable[Target]) -> tuple[TargetPart, ...]:
        """Return the parts of a target in the first form whose tensors are all in the checkpoint.
        Raises ``ModelError`` if each form lacks tensors. targets: those of the whole model."""
        for way in target.ways:
            if all(map(self._is_there, way)):
                return way
        nearest = max(target.ways, key=lambda way: sum(map(self._is_there, way)))
        missing = next(part for part in nearest if not self._is_there(part))
        raise ModelError(
            f"{self._checkpoint.root} lacks the tensor {missing.name} of shape {missing.shape}"
            f"{self._why_missing(targets)}"
        )

    def _why_missing(self, targets: Iterable[Target]) -> str:
        """The end of a message on a missing tensor: why it may be missing, and what to do."""
        parts = (part for target in targets for way in target.ways for part in way)
        modules = {part.name.rpartition(".")[0] for part in parts}
        for name in self._checkpoint.tensors:
            if name.rpartition(".")[0] not in modules and not self._may_be_left(name):
                return (
                    f", but has {name}, which is not part of the model: config.json describes "
                    "another model, or tensors are not named as in transformers. To rename them, "
                    "load the model with transformers and save it again"
                )
        return "; its files are incomplete or do not belong to its config.json"

    def _is_there(self, part: TargetPart) -> bool:
        if part.name in self._checkpoint.tensors:
            return True
        return self._modules is not None and self._modules.holds(part)

    def _names(self, part: TargetPart) -> list[str]:
        """Names of the tensors that store ``part``. Raises ``ModelError`` if the shape is wrong."""
        if self._modules is not None and self._modules.holds(part):
            return list(self._modules.tensors(part).values())
        stored = self._checkpoint.tensors[part.name]
        if stored.shape != part.shape:
            raise ModelError(
                f"{part.name} in {stored.file} has shape {stored.shape}, config.json "
                f"implies {part.shape}; the two do not belong together"
            )
        return [part.name]

    def _check_left_over(self, used: set[str]) -> None:
        stored = self._checkpoint.tensors
        # With tied tables an output layer may be stored as well; it is equal, see load.py.
        found = [name for name in stored if name not in used and not is_head(name)]
        left_over = [name for name in found if not self._may_be_left(name)]
        if left_over:
            name = left_over[0]
            raise ModelError(
                f"{len(left_over)} tensors are not part of the model that config.json describes, "
                f"such as {name} of shape {stored[name].shape} in {stored[name].file}"
            )

    def _may_be_left(self, name: str) -> bool:
        if self._modules is not None and self._modules.may_be_left(name):
            return True
        is_unread = any(pattern.search(name) for pattern in (DERIVED, self._unread))
        return is_unread or is_kv_scale(name)


def rows_of(part: TargetPart) -> range:
    """The rows of a matrix that a part has."""
    first = part.start // part.shape[-1]
    return range(first, first + part.num_rows)


def merged(parts: Iterable[range]) -> list[range]:
    """Join adjacent and overlapping ranges. Returns ranges with the same members."""
    found: list[range] = []
    for part in sorted(parts, key=lambda one: one.start):
        if found and part.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found


class RandomWeights:
    """Random weights, which depend only on the seed and the target's name.

    A tensor repeats one sequence of random numbers, because drawing billions of numbers would take
    minutes. The sequence has a prime length, so that no two rows of a tensor are equal."""

    RUN = 1_048_573

    def __init__(self, seed: int, norm_weight: float = 1.0) -> None:
        """norm_weight: mean of the norm weights; 0 if a model stores them with 1 subtracted."""
        self._seed = seed
        self._norm_weight = norm_weight

    def load(self, target: Target, dtype: torch.dtype) -> torch.Tensor:
        out = allocate(target.shape, dtype)
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{self._seed} {target.name}".encode())
        )
        flat, shape = out.view(-1), target.whole or target.shape
        run = torch.randn(min(self.RUN, prod(shape)), generator=generator)
        run *= shape[-1] ** -0.5 if out.dim() > 1 else 0.02
        if out.dim() == 1 and not target.name.endswith("bias"):
            run += self._norm_weight
        run = run.to(out.dtype)
        if target.whole:
            self._fill_part(target, run, out)
            return out
        for begin in range(0, flat.numel(), self.RUN):
            piece = flat[begin : begin + self.RUN]
            piece.copy_(run[: piece.numel()])
        return out

    def _fill_part(self, target: Target, run: torch.Tensor, out: torch.Tensor) -> None:
        """Fill a rank's part of a target with the numbers that the whole has there."""
        width, (rows, columns) = prod(target.whole[1:]), target.cut
        taken = torch.arange(width) if columns is None else torch.tensor(columns)
        at_once = max(1, self.RUN // len(taken))
        filled, flat = 0, out.view(out.shape[0], -1)
        for part in rows or (range(target.whole[0]),):
            for first in range(part.start, part.stop, at_once):
                mine = torch.arange(first, min(part.stop, first + at_once))
                places = (mine[:, None] * width + taken) % len(run)
                flat[filled : filled + len(mine)] = run[places]
                filled += len(mine)


def is_head(name: str) -> bool:
    """Whether a tensor is the output layer's matrix, with any prefix."""
    return name == HEAD or name.endswith(f".{HEAD}")
