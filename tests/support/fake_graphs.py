"""Streams, events and graphs of `fake_cuda`: what orders work, and what repeats it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.triton.launch import Launch
from support.device_memory import HOST, Block

if TYPE_CHECKING:
    from support.fake_cuda import FakeCuda


class Stream:
    """``torch.cuda.Stream``: work is done in the order in which it is queued."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        graph = self._cuda.graph
        if graph is not None and (self is graph.stream) != (event.stream is graph.stream):
            self._cuda.fault("a captured stream and another wait for each other")
        self._cuda.clocks.learn(self.name, event.known)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.wait("Stream.synchronize", self._cuda.clocks.known(self.name))


class Event:
    """What was queued on a stream when it was recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.known: dict[str, int] = {}
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        clocks = self._cuda.clocks
        self.stream = stream or self._cuda.stream
        clocks.learn(self.stream.name, clocks.known(HOST))
        clocks.tick(self.stream.name)
        self.known = clocks.known(self.stream.name)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._cuda.stream).wait_event(self)

    def synchronize(self) -> None:
        self._cuda.wait("Event.synchronize", self.known)

    def elapsed_time(self, later: Event) -> float:
        for event in (self, later):
            name = event.stream.name if event.stream else ""
            if not self._cuda.clocks.knows(HOST, name, event.known.get(name, 0)):
                self._cuda.fault("elapsed_time of an event that may not have been reached")
        return 1.0


class Recorded(NamedTuple):
    """What a graph repeats, and the memory that it was given: blocks with serial numbers."""

    name: str
    repeat: Callable[[], None]
    given: list[tuple[Block, int]]


class Graph:
    """``torch.cuda.CUDAGraph``. It keeps no tensor: memory of the graphs' pool that is freed while
    or after one is captured goes to what is captured next."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._steps: list[Recorded] = []
        self._own: dict[int, Block] = {}  # by serial
        self.stream = cuda.default
        self.pool = ""

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        cuda = self._cuda
        if cuda.stream is cuda.default:
            cuda.fault("capture on the default stream")
        self.stream, self.pool = cuda.stream, pool or torch.cuda.graph_pool_handle()
        cuda.graph = self

    def capture_end(self) -> None:
        self._cuda.graph = None

    def own(self, tensor: torch.Tensor) -> None:
        block = self._cuda.memory.block_of(tensor)
        assert block is not None
        self._own[block.serial] = block

    def record(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:
        """An operation of torch. made: tensors to hold its results."""
        alias, cuda = self._cuda.memory.alias, self._cuda
        given = self._given([args, kwargs, made])
        args, kwargs, written, made = tree_map_only(
            torch.Tensor, alias, (args, kwargs, written, made)
        )
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]

        def repeat() -> None:
            out = func(*args, **kwargs)
            results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            for place, result in zip(made, results if made else (), strict=True):
                place.copy_(result)
            cuda.queue(name, read, [*written, *made])

        self._steps.append(Recorded(name, repeat, given))

    def record_launch(self, launch: Launch, run: Callable[[Launch], Any]) -> None:
        args = tree_map_only(torch.Tensor, self._cuda.memory.alias, launch.args)
        again, name = launch._replace(args=args), launch.kernel.fn.__name__
        repeat = lambda: self._cuda.launch(again, run)  # noqa: E731
        self._steps.append(Recorded(name, repeat, self._given(launch.args)))

    def replay(self) -> None:
        cuda = self._cuda
        if cuda.graph is not None:
            cuda.fault("replay while capturing")
        cuda.num_replays += 1
        for block in cuda.memory.free_of(self.pool):
            block.poison()
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for step in self._steps:
                for block, serial in step.given:
                    self._check(step.name, block, serial)
                step.repeat()

    def _given(self, values: Any) -> list[tuple[Block, int]]:
        tensors = (x for x in tree_leaves(values) if isinstance(x, torch.Tensor))
        blocks = (self._cuda.memory.block_of(x) for x in tensors)
        return [(block, block.serial) for block in blocks if block is not None]

    def _check(self, name: str, block: Block, serial: int) -> None:
        """It is still that tensor's, or the graph's own and nobody else's."""
        is_same = block.serial == serial
        is_own = serial in self._own
        if not (is_same and block.is_live) and not (is_own and (is_same or not block.is_live)):
            self._cuda.fault(f"replayed {name} touches memory that was freed since")


def surface(cuda: FakeCuda) -> dict[str, Any]:
    """What takes the place of names of ``torch.cuda``."""
    memory = cuda.memory

    def reset() -> None:
        memory.peak = memory.allocated

    def synchronize(device: Any = None) -> None:
        for stream in cuda.clocks.threads:
            cuda.clocks.learn(HOST, cuda.clocks.known(stream))
        cuda.wait("torch.cuda.synchronize", cuda.clocks.known(HOST))

    def stream_of(device: Any = None, **options: Any) -> Stream:
        return Stream(cuda, f"stream {next(cuda.numbers)}")

    def pool() -> str:
        return f"pool {next(cuda.numbers)}"

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        before, cuda.stream = cuda.stream, stream or cuda.stream
        try:
            yield
        finally:
            cuda.stream = before

    total = 1 << 30
    return {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a made-up GPU",
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: cuda.num_devices,
        "current_stream": lambda device=None: cuda.stream,
        "default_stream": lambda device=None: cuda.default,
        "stream": on,
        "Stream": stream_of,
        "Event": lambda **options: Event(cuda),
        "CUDAGraph": lambda **options: Graph(cuda),
        "graph_pool_handle": pool,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: reset(),
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "max_memory_reserved": lambda device=None: memory.reserved,
        "memory_reserved": lambda device=None: memory.reserved,
        "mem_get_info": lambda device=None: (total - memory.reserved, total),
    }
