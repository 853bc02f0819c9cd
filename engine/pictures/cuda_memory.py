"""Memory of a CUDA device that other processes open, by functions of the driver.

torch's own sharing keeps counters in files of ``/dev/shm``, and never frees what a process that has
died had not read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.ipc.device_pixels import Mark
from engine.messages.media import SharedArray

DRIVER = "libcuda.so.1"
HANDLE_BYTES = 64
OUT_OF_MEMORY = 2
LAZY_PEER_ACCESS = 1
UNIT = 2 << 20  # bytes; smaller allocations are parts of larger ones, which would be shared whole
DTYPES = {
    "|b1": torch.bool, "|i1": torch.int8, "|u1": torch.uint8,
    "<i2": torch.int16, "<u2": torch.uint16, "<f2": torch.float16,
    "<i4": torch.int32, "<u4": torch.uint32, "<f4": torch.float32,
    "<i8": torch.int64, "<u8": torch.uint64, "<f8": torch.float64,
}  # fmt: skip


class CudaBlock(NamedTuple):
    """Device memory at an address, in bytes."""

    address: int
    num_bytes: int


class CudaMemory:
    """The memory of one device, as ``engine.ipc.device_pixels.DeviceMemory``. Thread-safe."""

    def __init__(self, device: torch.device, name: str, driver: Any = None) -> None:
        """name: of the device; driver: its functions, by default of the library. Raises ``OSError``
        if the driver is missing or cannot use the device."""
        self._device = device
        self.name = name
        self._driver = ctypes.CDLL(DRIVER) if driver is None else driver
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(number), device.index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def allocate(self, num_bytes: int) -> CudaBlock:
        address = ctypes.c_uint64()
        rounded = -(-num_bytes // UNIT) * UNIT
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(rounded))
        return CudaBlock(address.value, num_bytes)

    def free(self, block: CudaBlock) -> None:
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(block.address))

    def export(self, block: CudaBlock) -> bytes:
        handle = _Handle()
        with self._current():
            address = ctypes.c_uint64(block.address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes, num_bytes: int) -> CudaBlock:
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a handle of CUDA memory has {HANDLE_BYTES} bytes, not {len(handle)}")
        given = _Handle.from_buffer_copy(handle)
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, LAZY_PEER_ACCESS)
            self._call("cuMemGetAddressRange_v2", None, ctypes.byref(size), address)
            if size.value < num_bytes:
                self._call("cuIpcCloseMemHandle", address)
                raise OSError(f"the memory has {size.value} bytes, not {num_bytes}")
        return CudaBlock(address.value, num_bytes)

    def close(self, block: CudaBlock) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(block.address))

    def write(self, block: CudaBlock, offset: int, data: bytes | memoryview) -> None:
        if not len(data):
            return
        source = np.frombuffer(data, np.uint8)
        target = ctypes.c_uint64(block.address + offset)
        size = ctypes.c_size_t(len(source))
        with self._current():
            self._call("cuMemcpyHtoD_v2", target, ctypes.c_void_p(source.ctypes.data), size)

    def view(self, block: CudaBlock, array: SharedArray) -> torch.Tensor:
        dtype = DTYPES[array.dtype]
        num_bytes = prod(array.shape) * dtype.itemsize
        if not num_bytes:
            return torch.zeros(array.shape, dtype=dtype, device=self._device)
        part = _Bytes(block.address + array.offset, num_bytes)
        return torch.as_tensor(part, device=self._device).view(dtype).reshape(array.shape)

    def mark(self) -> Mark:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context, which torch uses too, that of this thread."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: Any) -> None:
        """Call a function of the driver. Raises ``MemoryError`` or ``OSError``."""
        result = getattr(self._driver, name)(*args)
        if result:
            kind = MemoryError if result == OUT_OF_MEMORY else OSError
            raise kind(f"{name} returned CUDA error {result}")


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * HANDLE_BYTES),)


class _Bytes:
    """Device memory for ``torch.as_tensor``, which does not copy it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def cuda_memory(device: torch.device) -> CudaMemory:
    """The memory of a CUDA device of this process. Raises ``OSError`` if it cannot be shared."""
    if device.type != "cuda":
        raise OSError(f"{device} has no memory of its own")
    if torch.version.hip is not None:
        raise OSError("memory of AMD's GPUs is not shared")
    # The same in all processes, however they number the devices.
    return CudaMemory(device, str(torch.cuda.get_device_properties(device).uuid))


def find_device(name: str) -> CudaMemory:
    """The memory of the device with this name. Raises ``OSError`` if this process cannot use it."""
    for index in range(torch.cuda.device_count()):
        memory = cuda_memory(torch.device("cuda", index))
        if memory.name == name:
            return memory
    raise OSError(f"this process does not see the GPU {name}")
