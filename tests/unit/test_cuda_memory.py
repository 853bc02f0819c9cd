"""CUDA memory for other processes, with a made-up driver: what is called, and what is released."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from engine.pictures.cuda_memory import HANDLE_BYTES, UNIT, CudaMemory

CONTEXT = 77


class Driver:
    """The functions of the driver, on memory of the host. Handles are addresses."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.opened: list[int] = []
        self.contexts: list[int] = []
        self.results: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self.results:
            return lambda *args: self.results[name]
        return getattr(self, f"do_{name}")

    def do_cuInit(self, flags: int) -> int:
        return 0

    def do_cuDeviceGet(self, number: Any, index: int) -> int:
        number._obj.value = index
        return 0

    def do_cuDevicePrimaryCtxRetain(self, context: Any, number: ctypes.c_int) -> int:
        context._obj.value = CONTEXT + number.value
        return 0

    def do_cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self.contexts.append(context.value or 0)
        return 0

    def do_cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.contexts.pop()
        return 0

    def do_cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        block = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(block)
        self.blocks[ctypes.addressof(block)] = block
        return self._result()

    def do_cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        del self.blocks[address.value]
        return self._result()

    def do_cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        data = address.value.to_bytes(8, "little")
        ctypes.memmove(ctypes.addressof(handle._obj), data, len(data))
        return self._result()

    def do_cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        address._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        self.opened.append(address._obj.value)
        return self._result() or flags - 1

    def do_cuMemGetAddressRange_v2(self, base: None, size: Any, address: ctypes.c_uint64) -> int:
        size._obj.value = len(self.blocks[address.value])
        return self._result()

    def do_cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        self.opened.remove(address.value)
        return self._result()

    def do_cuMemcpyHtoD_v2(self, target: Any, source: Any, size: Any) -> int:
        ctypes.memmove(target.value, source.value, size.value)
        return self._result()

    def _result(self) -> int:
        return 0 if self.contexts == [CONTEXT + 1] else 201  # invalid context


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def memory(driver: Driver) -> CudaMemory:
    return CudaMemory(torch.device("cuda", 1), "GPU-1", driver)


def test_memory_is_shared_whole_and_released(memory, driver):
    """Each call has the device's context, which the thread loses afterwards."""
    block = memory.allocate(1000)
    assert {len(each) for each in driver.blocks.values()} == {UNIT}
    memory.write(block, 3, b"pixels")
    memory.write(block, 9, memoryview(b"!"))
    memory.write(block, 10, b"")
    handle = memory.export(block)
    opened = memory.open(handle, 1000)
    assert ctypes.string_at(opened.address, 11) == b"\0\0\0pixels!\0"
    memory.close(opened)
    memory.free(block)
    assert (driver.blocks, driver.opened, driver.contexts) == ({}, [], [])


def test_handles_of_less_memory_are_closed_again(memory, driver):
    handle = memory.export(memory.allocate(1000))
    with pytest.raises(OSError, match=f"has {UNIT} bytes, not {UNIT + 1}"):
        memory.open(handle, UNIT + 1)
    for wrong in (b"", bytes(HANDLE_BYTES + 1)):
        with pytest.raises(OSError, match="has 64 bytes"):
            memory.open(wrong, 1)
    assert (driver.opened, driver.contexts) == ([], [])


@pytest.mark.parametrize(("result", "kind"), [(2, MemoryError), (1, OSError), (201, OSError)])
def test_errors_of_the_driver_have_their_numbers(result, kind, memory, driver):
    driver.results["cuMemAlloc_v2"] = result
    with pytest.raises(kind, match=f"cuMemAlloc_v2 returned CUDA error {result}"):
        memory.allocate(1)
    assert driver.contexts == []
