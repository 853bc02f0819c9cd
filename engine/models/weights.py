"""The tensors of a decoder, read or made up, each in its place and in the dtype computed with."""

from __future__ import annotations

import mmap
import re
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Protocol, Self

import torch

from engine.errors import ModelError
from engine.models.checkpoint import Checkpoint
from engine.models.targets import Part, Target

# Tensors that older checkpoints hold and nobody needs: they follow from config.json.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
# Targets read before they are asked for: hides reading behind packing, costs little memory.
AHEAD = 2
OWN_PAGES_BYTES = 1 << 20


class Source(Protocol):
    """Where tensors come from."""

    def load(self, target: Target, out: torch.Tensor) -> None:
        """Fill ``out``, [*target.shape] on the CPU."""
        ...


class Weights:
    """The tensors of a decoder, each handed out once; a thread reads those that come next.

    Use as a context manager; ask in the order of ``targets`` for speed.
    """

    def __init__(self, targets: Iterable[Target], source: Source, dtype: torch.dtype) -> None:
        self._targets = deque(targets)
        self._source = source
        self._dtype = dtype
        self._ready: dict[str, Future[torch.Tensor]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.shutdown(cancel_futures=True)

    def take(self, name: str) -> torch.Tensor:
        """The tensor of a target, on the CPU; it is the caller's from now on."""
        while self._targets and (name not in self._ready or len(self._ready) <= AHEAD):
            following = self._targets.popleft()
            self._ready[following.name] = self._reader.submit(self._load, following)
        return self._ready.pop(name).result()

    def _load(self, target: Target) -> torch.Tensor:
        out = allocate(target.shape, self._dtype)
        self._source.load(target, out)
        return out


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor; a large one's memory goes back to the system the moment it is dropped.

    What was packed for the device is dropped at once, and malloc would keep tens of megabytes.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < OWN_PAGES_BYTES:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # far fewer page faults while it is filled
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class StoredWeights:
    """Reads targets from a checkpoint, tensor by tensor."""

    def __init__(self, checkpoint: Checkpoint, targets: Iterable[Target]) -> None:
        """Match names and shapes. Raises ``ModelError`` naming what is missing, left over or of
        another shape, before anything is read."""
        self._checkpoint = checkpoint
        self._parts = {target.name: self._choose(target) for target in targets}
        self._check_shapes()
        self._check_left_over()

    def load(self, target: Target, out: torch.Tensor) -> None:
        flat, filled = out.view(-1), 0
        for part in self._parts[target.name]:
            self._checkpoint.read(part.name, part.start, flat[filled : filled + part.size])
            filled += part.size

    def _choose(self, target: Target) -> tuple[Part, ...]:
        """The first way whose tensors are all there."""
        stored = self._checkpoint.tensors
        for way in target.ways:
            if all(part.name in stored for part in way):
                return way
        nearest = max(target.ways, key=lambda way: sum(part.name in stored for part in way))
        missing = next(part for part in nearest if part.name not in stored)
        raise ModelError(
            f"{self._checkpoint.root} lacks the tensor {missing.name} of shape {missing.shape}; "
            "its files are incomplete or do not belong to its config.json"
        )

    def _check_shapes(self) -> None:
        for parts in self._parts.values():
            for part in parts:
                stored = self._checkpoint.tensors[part.name]
                if stored.shape != part.shape:
                    raise ModelError(
                        f"{part.name} in {stored.file} has shape {stored.shape}, config.json "
                        f"implies {part.shape}; the two do not belong together"
                    )

    def _check_left_over(self) -> None:
        used = {part.name for parts in self._parts.values() for part in parts}
        # An output layer beside a table it is tied to holds the same numbers: see load.py.
        used.add("lm_head.weight")
        stored = self._checkpoint.tensors
        left_over = [name for name in stored if name not in used and not DERIVED.search(name)]
        if left_over:
            name = left_over[0]
            raise ModelError(
                f"{len(left_over)} tensors have no place in the model that config.json describes, "
                f"{name} of shape {stored[name].shape} in {stored[name].file} among them"
            )


class RandomWeights:
    """Made-up weights, the same for the same target and seed.

    One run of normal numbers is repeated through a tensor: at 8 B parameters drawing each would
    take minutes. Its length is a prime, so that no two rows are alike.
    """

    RUN = 1_048_573

    def __init__(self, seed: int, norm_weight: float = 1.0) -> None:
        """norm_weight: what a norm's weights are around; zero where offsets are stored."""
        self._seed = seed
        self._norm_weight = norm_weight

    def load(self, target: Target, out: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{self._seed} {target.name}".encode())
        )
        flat = out.view(-1)
        run = torch.randn(min(self.RUN, flat.numel()), generator=generator)
        run *= out.shape[-1] ** -0.5 if out.dim() > 1 else 0.02
        if out.dim() == 1 and not target.name.endswith("bias"):
            run += self._norm_weight
        run = run.to(out.dtype)
        for begin in range(0, flat.numel(), self.RUN):
            piece = flat[begin : begin + self.RUN]
            piece.copy_(run[: piece.numel()])
