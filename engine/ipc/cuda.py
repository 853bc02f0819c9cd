"""CUDA memory that other processes can map, by the driver's own calls.

torch has such a thing for itself, with reference counts in named shared memory, which a killed
process leaves behind. A handle here is 64 bytes that name an allocation; nothing has a name.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from engine.ipc.tensors import Exported

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # the only flag there is


class Mapped(NamedTuple):
    """Memory of another process, as seen here."""

    pointer: int
    num_bytes: int


class _Bytes:
    """Device memory as torch takes it over from others, without owning it."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaDevice:
    """``ipc.tensors.Device`` on one CUDA GPU."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)

    def describe(self, tensor: torch.Tensor) -> tuple[str, list[int], int]:
        name = str(tensor.dtype).removeprefix("torch.")
        return name, list(tensor.shape), tensor.numel() * tensor.element_size()

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()

    def to_host(self, tensor: torch.Tensor) -> bytes:
        return tensor.cpu().flatten().view(torch.uint8).numpy().tobytes()

    def from_host(self, data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(data), dtype=_dtype(dtype))
        return flat.reshape(shape).to(self._device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # no device, or no room on it
            raise OSError(str(error)) from error

    def export(self, memory: torch.Tensor) -> Exported:
        handle = (ctypes.c_byte * HANDLE_BYTES)()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        pointer = ctypes.c_uint64(memory.data_ptr())
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Exported(bytes(handle), memory.data_ptr() - base.value)

    def copy_in(self, memory: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
        flat = tensor.flatten().view(torch.uint8)
        memory[offset : offset + flat.numel()].copy_(flat, non_blocking=True)

    def map(self, handle: bytes) -> Mapped:
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
        torch.empty(0, device=self._device)  # has torch make the context that is mapped into
        pointer, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        packed = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        with torch.cuda.device(self._device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), packed, flags)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        return Mapped(pointer.value, size.value)

    def copy_out(self, mapped: Mapped, offset: int, dtype: str, shape: list[int]) -> torch.Tensor:
        kind = _dtype(dtype)
        num_bytes = prod(shape) * kind.itemsize
        if min([offset, *shape, 0]) < 0 or offset + num_bytes > mapped.num_bytes:
            raise OSError(f"bytes {offset}..{offset + num_bytes} of {mapped.num_bytes} are asked")
        copy = torch.empty(shape, dtype=kind, device=self._device)
        if num_bytes:
            theirs = torch.as_tensor(
                _Bytes(mapped.pointer + offset, num_bytes), device=self._device
            )
            copy.view(-1).view(torch.uint8).copy_(theirs, non_blocking=True)
        return copy

    def unmap(self, mapped: Mapped) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(mapped.pointer))

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

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


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise OSError(f"{name!r:.80} is no type of tensors")
    return found
