"""A made-up ``torch.cuda`` under the real platform, runner and kernels: what only a device does.

Tensors "on cuda" lie in the arena of `device_memory`. Every operation of torch and every launch of
Triton's (interpreted) is done at once, but its accesses are entered, by ranges of bytes, as the
stream's that it was queued on: two accesses, one of them a write, that nothing orders are a fault
that names both. A graph records operations and repeats them on the same memory, not by running
Python again, so a value of the host is baked in and a pointer stays; its own memory is poisoned in
between. Whatever a capture must not do is a fault. Each time the host waits is listed.

    cuda = FakeCuda()
    with cuda:
        ...                 # device="cuda", as there
    assert not cuda.faults

Modes of torch belong to a thread: what other threads do to tensors of the device is not seen.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
import triton
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpreterBuilder

from kernels.triton.launch import Launch
from support.device_memory import HOST, PINNED, POOL, Access, Clocks, Memory, Range
from support.fake_calls import Calls, Operations
from support.fake_graphs import Graph, Stream, surface
from support.fake_nccl import FakeNccl, Options

DEFAULT = "the default stream"
NO_WRITE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
WAITING = {
    "item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2",
    "unique_dim", "bincount",
}  # fmt: skip
"""Operations whose result the host has to know before it goes on."""


class Wait(NamedTuple):
    """The host waited. is_drained: for the newest work there was, so that the device then idles."""

    what: str
    where: str
    is_drained: bool


class Sent(NamedTuple):
    """A copy out of pinned memory that the host does not know to be done."""

    thread: str
    time: int
    address: int
    values: bytes
    where: str


class FakeCuda:
    """One device. ``faults`` and ``waits`` grow; use as a context manager, as often as wanted.

    num_devices: how many this process sees; it computes on the first."""

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.clocks = Clocks()
        self.memory = Memory(self.clocks)
        self.faults: list[str] = []
        self.waits: list[Wait] = []
        self.num_replays = 0
        self.numbers = count(1)  # of streams and pools
        self.stream = Stream(self, name=DEFAULT)
        self.default = self.stream
        self.graph: Graph | None = None  # that is being captured
        self._noted: dict[tuple[int, int, bool], None] = {}  # addresses that a launch touches
        self._newest = 0  # of the default stream's work, marks apart
        self._sent: list[Sent] = []
        self._active: list[Any] = []

    def __enter__(self) -> FakeCuda:
        patch = pytest.MonkeyPatch()
        for name, value in surface(self).items():
            patch.setattr(torch.cuda, name, value)
        nccl = partial(FakeNccl, self)
        nccl.Options = Options  # type: ignore[attr-defined]
        patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        patch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
        uses = lambda x, stream: self.record_stream(x, stream)  # noqa: E731
        patch.setattr(torch.Tensor, "record_stream", uses)
        patch.setattr(triton.runtime.driver, "_active", Driver())
        run = Launch.run
        patch.setattr(Launch, "run", lambda launch: self.launch(launch, run))
        for name, is_read, is_write in (
            ("create_masked_load", True, False),
            ("create_masked_store", False, True),
            ("create_atomic_rmw", True, True),
            ("create_atomic_cas", True, True),
        ):
            patch.setattr(InterpreterBuilder, name, self._noting(name, is_read, is_write))
        modes = Calls(self), Operations(self)
        for mode in modes:
            mode.__enter__()
        self._active.append((patch, modes))
        return self

    def __exit__(self, *exc: object) -> None:
        patch, modes = self._active.pop()
        for mode in reversed(modes):
            mode.__exit__(*exc)
        patch.undo()

    # -- what tells of itself

    def fault(self, text: str) -> None:
        text = f"{text} [{where()}]"
        if text not in self.faults:
            self.faults.append(text)

    def wait(self, what: str, known: dict[str, int]) -> None:
        """The host sleeps until all this is done."""
        if self.graph is not None:
            self.fault(f"{what} while capturing")
        self._check_sent()
        is_drained = known.get(self.default.name, 0) >= self._newest
        self.waits.append(Wait(what, where(), is_drained))
        self.clocks.learn(HOST, known)
        is_done = self.clocks.knows
        self._sent = [one for one in self._sent if not is_done(HOST, one.thread, one.time)]

    def access(
        self, thread: str, what: str, reads: Sequence[Range], writes: Sequence[Range]
    ) -> None:
        if thread != HOST:  # it is queued now
            self.clocks.learn(thread, self.clocks.known(HOST))
        access = Access(thread, self.clocks.tick(thread), what, where())
        if thread == self.default.name:
            self._newest = access.time
        for ranges, is_write in ((reads, False), (writes, True)):
            for block, begin, end in ranges:
                for earlier in block.touch(begin, end, access, is_write=is_write):
                    if not self.clocks.knows(thread, earlier.thread, earlier.time):
                        kind = "pinned memory" if block.home[0] == PINNED else "memory"
                        did = "writes" if is_write else "reads"
                        self.fault(f"{access} {did} {kind}, and nothing orders it and {earlier}")

    # -- operations

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation as torch's dispatcher has it."""
        schema, name = func._schema, func._schema.name.partition("::")[2]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if self.is_here(x)]
        taken = zip(schema.arguments, args, strict=False)
        named = ((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs)
        aliased = [(a.alias_info, value) for a, value in (*taken, *named) if a.alias_info]
        written = [
            x
            for info, value in aliased
            if info.is_write
            for x in tree_leaves(value)
            if isinstance(x, torch.Tensor)
        ]
        if not here:
            return self._on_host(func, args, kwargs, tensors, written, is_view=bool(aliased))
        if name == "copy_":
            return self.copy(*args, **kwargs)
        self._check_places(name, args, tensors)
        if name in WAITING or (name in ("index", "index_put_") and picks_by_mask(name, args)):
            self.queue(name, here, [])
            self.wait(name, self.clocks.known(self.stream.name))
        elif aliased and not written:
            out = func(*args, **kwargs)
            if all(self.is_ours(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
                return out  # a view
        return self.compute(name, func, args, kwargs, written)

    def compute(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
    ) -> Any:
        """Queue an operation on the current stream; while capturing, record it."""
        is_captured = self._is_captured(name)
        if is_captured and written:  # what it returns is what it would have written to
            out = written[0] if len(written) == 1 else tuple(written)
        else:
            out = self._result(func, args, kwargs, is_captured=is_captured)
        made: list[torch.Tensor] = []

        def place(x: torch.Tensor) -> torch.Tensor:
            if self.is_ours(x) or (x.device.type == "meta" and not is_captured):
                return x
            made.append(self.new(x.shape, x.stride(), x.dtype))
            if not is_captured:
                made[-1].copy_(x)
            return made[-1]

        out = tree_map_only(torch.Tensor, place, out)
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        fresh = [] if name in NO_WRITE else made
        if is_captured and (fresh or written):
            assert self.graph is not None
            self.graph.record(name, func, args, kwargs, written, fresh)
        elif not is_captured:
            self.queue(name, read, [*written, *fresh])
        return out

    @staticmethod
    def _result(
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_captured: bool,
    ) -> Any:
        """What an operation returns; while capturing, only its shape counts."""
        try:
            return func(*args, **kwargs)
        except IndexError:
            if not is_captured:
                raise
        # What is captured has no values yet, and an index may be anything.
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
        return func(*args, **kwargs)

    def launch(self, launch: Launch, run: Callable[[Launch], Any]) -> Any:
        name = launch.kernel.fn.__name__
        if self._is_captured(name):
            assert self.graph is not None
            for x in tree_leaves(launch.args):
                if isinstance(x, torch.Tensor) and not self.is_here(x):
                    self.fault(f"captured {name} is given memory of the host")
            self.graph.record_launch(launch, run)
            return None
        self._noted = {}
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            compiled = run(launch)
        reads, writes = self._merged(name)
        self.access(self.stream.name, name, reads, writes)
        return compiled

    def copy(
        self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """``Tensor.copy_``, of which one side at least lies on the device."""
        both = self.is_here(to) and self.is_here(source)
        pinned = self.is_ours(to) and self.is_ours(source)
        if self._is_captured("copy_"):
            if not both:
                self.fault("captured copy_ reads or writes memory of the host")
            assert self.graph is not None
            self.graph.record("copy_", torch.Tensor.copy_, (to, source), {}, [to], [])
            return to
        to.copy_(source)
        self.queue("copy_", [source], [to])
        if not self.is_here(source) and (sent := self.range_of(source)):
            time = self.clocks.known(self.stream.name)[self.stream.name]
            values = ctypes.string_at(sent[1], sent[2] - sent[1])
            self._sent.append(Sent(self.stream.name, time, sent[1], values, where()))
        if not both and not (pinned and non_blocking):
            kind = "pinned" if pinned else "pageable"
            self.wait(f"copy_ of {kind} memory", self.clocks.known(self.stream.name))
        return to

    def queue(self, what: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        ranges = [[r for x in xs if (r := self.range_of(x))] for xs in (read, written)]
        self.access(self.stream.name, what, *ranges)

    # -- memory

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, for the current stream; while capturing, of the graph."""
        is_captured = self.graph is not None and self.stream is self.graph.stream
        pool = self.graph.pool if is_captured and self.graph is not None else POOL
        made = self.memory.allocate(shape, stride, dtype, (pool, self.stream.name))
        if is_captured and self.graph is not None:
            self.graph.own(made)
        return made

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return self.memory.allocate(like.shape, like.stride(), like.dtype, (PINNED, HOST))

    def record_stream(self, x: torch.Tensor, stream: Stream) -> None:
        block = self.memory.block_of(x)
        if block is not None and stream.name != block.home[1]:
            block.users.add(stream.name)

    def is_ours(self, x: torch.Tensor) -> bool:
        """On the device, or pinned."""
        return self.memory.block_of(x) is not None

    def is_here(self, x: torch.Tensor) -> bool:
        block = self.memory.block_of(x)
        return block is not None and block.home[0] != PINNED

    def range_of(self, x: torch.Tensor) -> Range | None:
        block = self.memory.block_of(x)
        if block is None or not x.numel():
            return None
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return block, x.data_ptr(), x.data_ptr() + (last + 1) * x.dtype.itemsize

    # -- helpers

    def _check_sent(self) -> None:
        """What was sent has not been written over while it may still be read."""
        for one in self._sent:
            if ctypes.string_at(one.address, len(one.values)) != one.values:
                self.fault(f"the host wrote over what copy_ on {one.thread} ({one.where}) sends")

    def _is_captured(self, what: str) -> bool:
        if self.graph is None:
            return False
        if self.stream is not self.graph.stream:
            self.fault(f"{what} on {self.stream.name} while {self.graph.stream.name} is captured")
            return False
        return True

    def _on_host(self, func, args, kwargs, tensors, written, *, is_view: bool):
        pinned = [x for x in tensors if self.is_ours(x)]
        if pinned and (written or not is_view):
            ranges = [[r for x in xs if (r := self.range_of(x))] for xs in (tensors, written)]
            self.access(HOST, str(func), *ranges)
        return func(*args, **kwargs)

    def _check_places(self, name: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """Only a number may lie on the host, and what picks rows, which is sent first."""
        strangers = [x for x in tensors if not self.is_here(x) and x.dim()]
        if not strangers:
            return
        if name not in ("index", "index_put_"):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        self.wait(f"upload of what {name} picks", self.clocks.known(self.stream.name))

    def _noting(self, name: str, is_read: bool, is_write: bool) -> Callable[..., Any]:
        """The interpreter's operation, which notes the addresses it touches."""
        original = getattr(InterpreterBuilder, name)

        def noting(builder, *args):
            ptrs = args[1] if name == "create_atomic_rmw" else args[0]
            mask = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
            places = ptrs.data
            # A mask made of several conditions may be of numbers.
            if name in mask and not (lanes := args[mask[name]].data.astype(bool)).all():
                places = places[lanes]
            if places.size:
                begin, last = int(places.min()), int(places.max())
                end = last + ptrs.get_element_ty().primitive_bitwidth // 8
                if self.memory.block_at(begin) is None or self.memory.block_at(end - 1) is None:
                    self.fault(f"{name[7:]} of memory that is not the device's")
                    raise RuntimeError("an illegal memory access was encountered")
                for did, kind in ((is_read, False), (is_write, True)):
                    if did:
                        self._noted[begin, end, kind] = None
            return original(builder, *args)

        return noting

    def _merged(self, name: str) -> tuple[list[Range], list[Range]]:
        """Ranges that a launch read and wrote. Those of no tensor are faults."""
        found: tuple[list[Range], list[Range]] = ([], [])
        for begin, end, is_write in sorted(self._noted):
            block, ranges = self.memory.block_at(begin), found[is_write]
            if block is None or end > block.end:
                self.fault(f"{name} touches memory of no tensor")
            elif not block.is_live and block.home[0] == POOL:
                self.fault(f"{name} touches memory that was freed")
            elif ranges and ranges[-1][0] is block and begin <= ranges[-1][2]:
                ranges[-1] = (block, ranges[-1][1], max(end, ranges[-1][2]))
            else:
                ranges.append((block, begin, end))
        return found


class Driver:
    """The part of Triton's driver that is needed before kernels are launched or interpreted."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def picks_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether rows are picked by a mask, whose ones are counted first; one number is filled in."""
    masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and not (name == "index_put_" and args[2].numel() == 1)


def where() -> str:
    """The innermost places of the engine that lead here."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if "/engine/" in name or "/kernels/" in name:
            found.append(f"{name.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)
