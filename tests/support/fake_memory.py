"""Memory of a GPU without one: tensors on `meta`, counted as torch's allocator would take them.

The real worker loads, profiles and records; nothing is computed, and no memory is taken. Segments,
rounding, splitting and the pools of streams and graphs follow c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.models.weights import RandomWeights, Weights
from engine.worker.platform import Fetched
from engine.worker.platform.cuda import CudaPlatform
from engine.worker.platform.host import HostMark
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, compiling_for

MIB = 1 << 20
SMALL, LARGE = MIB, 10 * MIB
CONTEXT_BYTES = 500 * MIB  # of the driver, once a process uses the device
GRAPH_BYTES = 3 * MIB  # that the driver keeps of each graph
META = torch.device("meta")

Pool = tuple[int, int, bool]  # of a graph or 0, stream, whether for small tensors


@dataclass
class Segment:
    """Memory taken from the device at once: [begin, size, is it free], without gaps."""

    pool: Pool
    blocks: list[list[Any]]

    @property
    def size(self) -> int:
        return sum(block[1] for block in self.blocks)

    @property
    def is_free(self) -> bool:
        return len(self.blocks) == 1 and bool(self.blocks[0][2])


@dataclass
class FakeDevice:
    """A device of so many bytes, and torch's allocator on it."""

    total: int
    segments: list[Segment] = field(default_factory=list)
    stream: int = 0
    capturing: int = 0  # the pool of the graph that is captured
    driver: int = CONTEXT_BYTES
    num_of_pool: dict[int, int] = field(default_factory=dict)  # graphs alive
    num_pools: int = 0
    peak: int = 0  # of what is reserved
    most_used: int = 0  # of the device, ever

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def left_by_recordings(self) -> int:
        """Bytes of other streams than the default one, outside graphs."""
        left = [each.size for each in self.segments if each.pool[0] == 0 and each.pool[1] != 0]
        return sum(left)

    def allocate(self, asked: int) -> tuple[Segment, list[Any]]:
        size = max(512, -(-asked // 512) * 512)
        is_small = size <= SMALL
        pool = (self.capturing, self.stream, is_small)
        fitting = [
            (block[1], number, block, segment)
            for number, segment in enumerate(self.segments)
            if segment.pool == pool
            for block in segment.blocks
            if block[2] and block[1] >= size
        ]
        if fitting:
            _, _, block, segment = min(fitting, key=lambda each: each[:2])
        else:
            taken = 2 * MIB if is_small else 20 * MIB
            if size >= LARGE:
                taken = -(-size // (2 * MIB)) * 2 * MIB
            block = [0, taken, True]
            segment = Segment(pool, [block])
            self.take(segment)
        if block[1] - size >= (512 if is_small else SMALL + 1):
            place = segment.blocks.index(block)
            segment.blocks.insert(place + 1, [block[0] + size, block[1] - size, True])
            block[1] = size
        block[2] = False
        return segment, block

    def take(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.peak = max(self.peak, self.reserved)
        self.note()
        assert self.reserved + self.driver <= self.total, "out of memory"

    def note(self) -> None:
        self.most_used = max(self.most_used, self.reserved + self.driver)

    def free(self, segment: Segment, block: list[Any]) -> None:
        block[2] = True
        merged: list[list[Any]] = []
        for each in segment.blocks:
            if merged and merged[-1][2] and each[2]:
                merged[-1][1] += each[1]
            else:
                merged.append(each)
        segment.blocks = merged

    def empty_cache(self) -> None:
        def is_kept(segment: Segment) -> bool:
            return not segment.is_free or bool(self.num_of_pool.get(segment.pool[0]))

        self.segments = [segment for segment in self.segments if is_kept(segment)]

    def new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def reset_peak(self) -> None:
        self.peak = self.reserved


class Counting(TorchDispatchMode):
    """Every new tensor on `meta` takes memory of the device until its storage ends."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device == META:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known or not storage.nbytes():
            return
        self._known.add(storage)
        place = self._device.allocate(storage.nbytes())
        weakref.finalize(storage, self._device.free, *place).atexit = False


class FakeStream:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait_stream(self, other: FakeStream) -> None: ...


class FakeGraph:
    """A graph keeps its pool, and some memory of the driver."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local" and not gc.isenabled()
        device = self._device
        device.capturing = pool
        device.num_of_pool[pool] = device.num_of_pool.get(pool, 0) + 1
        weakref.finalize(self, self._end, device, pool).atexit = False

    def capture_end(self) -> None:
        self._device.capturing = 0
        self._device.driver += GRAPH_BYTES
        self._device.note()

    @staticmethod
    def _end(device: FakeDevice, pool: int) -> None:
        device.num_of_pool[pool] -= 1
        device.driver -= GRAPH_BYTES


class MetaPlatform(CudaPlatform):
    """The real one but for what the host must hold or read."""

    def __init__(self) -> None:
        super().__init__()
        self.device = META

    def mark(self) -> Any:
        return HostMark()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(META)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        home = [torch.zeros(each.shape, dtype=each.dtype, device="cpu") for each in tensors]
        return Fetched(home, self.mark())


@contextmanager
def fake_memory(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetaPlatform]:
    """Within it `torch.cuda` is this device, as far as memory goes, and launches do nothing."""

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, device.stream = device.stream, stream.number
        yield
        device.stream = before

    streams = iter(range(1, 100))
    patches = {
        "current_device": lambda: 0,
        "Stream": lambda _: FakeStream(next(streams)),
        "current_stream": lambda *_: FakeStream(device.stream),
        "stream": on,
        "CUDAGraph": lambda: FakeGraph(device),
        "graph_pool_handle": device.new_pool,
        "synchronize": lambda *_: None,
        "empty_cache": device.empty_cache,
        "reset_peak_memory_stats": lambda *_: device.reset_peak(),
        "memory_reserved": lambda *_: device.reserved,
        "max_memory_reserved": lambda *_: device.peak,
        "mem_get_info": lambda *_: (device.total - device.driver - device.reserved, device.total),
    }
    for name, value in patches.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    monkeypatch.setattr(
        RandomWeights,
        "load",
        lambda self, target, dtype: torch.empty(target.shape, dtype=dtype, device=META),
    )
    take = Weights.take  # whose thread makes tensors that are not counted: on the host
    monkeypatch.setattr(Weights, "take", lambda self, name: take(self, name).clone())
    with compiling_for(DEVICES["sm_90"]), Counting(device):
        yield MetaPlatform()
