"""A device for tensors that does its copies as late as it may."""

from typing import Any

import msgspec
import numpy as np

from engine.ipc.tensors import Described, Exported, Mapped


class Note(msgspec.Struct, array_like=True, frozen=True, tag="note"):
    text: str


class FakeMemory:
    """Allocations of all "processes", by handle."""

    def __init__(self) -> None:
        self.by_handle: dict[bytes, bytearray] = {}

    def new(self, num_bytes: int) -> bytes:
        handle = f"handle {len(self.by_handle)}".encode()
        self.by_handle[handle] = bytearray(num_bytes)
        return handle


class FakeDevice:
    """One process's view of it. Copies happen when it is synchronised, and no sooner."""

    def __init__(self, memory: FakeMemory, room: int = 1 << 20, can_export: bool = True) -> None:
        self.memory = memory
        self.room = room
        self.can_export = can_export
        self.mapped: list[bytes] = []
        self._late: list[Any] = []

    def describe(self, tensor: np.ndarray) -> Described:
        return Described(str(tensor.dtype), list(tensor.shape), tensor.nbytes)

    def contiguous(self, tensor: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(tensor)

    def to_host(self, tensor: np.ndarray) -> bytes:
        return tensor.tobytes()

    def from_host(self, data: bytes, dtype: str, shape: list[int]) -> np.ndarray:
        return np.frombuffer(data, dtype).reshape(shape)

    def allocate(self, num_bytes: int) -> bytes:
        if num_bytes > self.room:
            raise OSError("out of memory")
        return self.memory.new(num_bytes)

    def export(self, memory: Any) -> Exported:
        if not self.can_export:
            raise OSError("not supported")
        if isinstance(memory, bytes):
            return Exported(memory, 0)
        handle = self.memory.new(memory.nbytes + 16)
        self.memory.by_handle[handle][16:] = memory.tobytes()
        return Exported(handle, 16)

    def copy_in(self, memory: bytes, offset: int, tensor: np.ndarray) -> None:
        data = tensor.tobytes()

        def copy() -> None:
            self.memory.by_handle[memory][offset : offset + len(data)] = data

        self._late.append(copy)

    def map(self, handle: bytes) -> Mapped:
        if handle not in self.memory.by_handle:
            raise OSError("invalid handle")
        self.mapped.append(handle)
        return Mapped(handle, len(self.memory.by_handle[handle]))

    def copy_out(self, mapped: Mapped, offset: int, dtype: str, shape: list[int]) -> np.ndarray:
        copy = np.zeros(shape, dtype)

        def fill() -> None:
            data = self.memory.by_handle[mapped.memory][offset : offset + copy.nbytes]
            copy[...] = np.frombuffer(data, dtype).reshape(shape)

        self._late.append(fill)
        return copy

    def unmap(self, mapped: Mapped) -> None:
        assert not self._late, "a copy from it may still run"
        self.mapped.remove(mapped.memory)

    def synchronize(self) -> None:
        late, self._late = self._late, []
        for work in late:
            work()
