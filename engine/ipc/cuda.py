"""CUDA memory that other processes can map, by the driver's own calls.

torch's own sharing keeps reference counts in named shared memory, which a killed process leaves
behind. Here a handle is 64 bytes that identify an allocation, and no name is left in the system.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch

from engine.ipc.host_tensors import HostDevice, bytes_of, dtype_of
from engine.ipc.tensors import Exported, Mapped

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # the only flag there is


class _Bytes:
    """Device memory as torch takes it over from others, without owning it."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaDevice(HostDevice):
    """``ipc.tensors.Device`` on one CUDA GPU. ``Mapped.memory`` is a pointer."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("cuda", index))
        self._copies: list[torch.cuda.Event] = []  # that may still run, on whatever stream

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._empty([num_bytes], torch.uint8)

    def export(self, memory: torch.Tensor) -> Exported:
        handle = (ctypes.c_byte * HANDLE_BYTES)()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        pointer = ctypes.c_uint64(memory.data_ptr())
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Exported(bytes(handle), memory.data_ptr() - base.value)

    def copy_in(self, memory: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
        flat = bytes_of(tensor)
        self._copy(memory[offset : offset + flat.numel()], flat)

    def map(self, handle: bytes) -> Mapped:
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
        self._empty([0], torch.uint8)  # has torch make the context that is mapped into
        pointer, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        packed = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        with torch.cuda.device(self._device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), packed, flags)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        return Mapped(pointer.value, size.value)

    def copy_out(self, mapped: Mapped, offset: int, dtype: str, shape: list[int]) -> torch.Tensor:
        tensor = self._empty(shape, dtype_of(dtype))
        flat = bytes_of(tensor)
        if flat.numel():
            theirs = _Bytes(mapped.memory + offset, flat.numel())
            self._copy(flat, torch.as_tensor(theirs, device=self._device))
        return tensor

    def unmap(self, mapped: Mapped) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(mapped.memory))

    def synchronize(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream(self._device).synchronize()
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.synchronize()

    def _copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            into.copy_(tensor, non_blocking=True)
            self._copies.append(torch.cuda.current_stream(self._device).record_event())

    def _empty(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except (RuntimeError, AssertionError) as error:  # no device, or no room on it
            raise OSError(str(error)) from error

    @cached_property
    def _driver(self) -> ctypes.CDLL:
        return ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._driver, name)(*args)
        if status:
            raise OSError(f"{name} failed with CUDA error {status}")


class _Handle(ctypes.Structure):
    """Passed by value, as the driver wants it."""

    _fields_ = (("bytes", ctypes.c_byte * HANDLE_BYTES),)
