"""CUDA memory that another process can read, by the driver's own calls.

torch's own sharing keeps reference counts in named shared memory, which a killed process leaves
behind. Here a handle is 64 bytes that identify an allocation, and no name is left in the system.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import msgspec
import torch

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # the only flag there is


class CudaMemory(msgspec.Struct, array_like=True, frozen=True, tag="cuda"):
    """An allocation of a GPU, by the driver's ``handle``, and an offset (bytes) into it."""

    handle: bytes
    offset: int


def export(tensor: torch.Tensor) -> CudaMemory:
    """How another process finds a contiguous tensor, which is computed when this returns.

    It must live, and not change, until it was read. Raises ``OSError`` for memory that the driver
    does not lend (of torch's expandable segments, for one).
    """
    handle = (ctypes.c_byte * HANDLE_BYTES)()
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    pointer = ctypes.c_uint64(tensor.data_ptr())
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    torch.cuda.current_stream(tensor.device).synchronize()
    return CudaMemory(bytes(handle), tensor.data_ptr() - base.value)


def copy_of(memory: CudaMemory, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` of what another process lends. [num_bytes] uint8

    It is complete, and nothing of the other process is mapped, when this returns. The copy has a
    stream of its own: it waits for nothing that the caller's stream does. Raises ``OSError`` if the
    memory cannot be read.
    """
    if device.type != "cuda":
        raise OSError(f"it lies on a GPU, and {device} is none")
    if len(memory.handle) != HANDLE_BYTES:
        raise OSError(f"a handle has {HANDLE_BYTES} bytes, this one {len(memory.handle)}")
    caller, stream = torch.cuda.current_stream(device), _stream_of(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        copy = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        copy.record_stream(caller)  # its memory is not given to the next copy while that reads it
        pointer, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        packed = _Handle.from_buffer_copy(memory.handle)
        _call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), packed, ctypes.c_uint(LAZY_PEER_ACCESS)
        )
        try:
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
            if not 0 <= memory.offset <= size.value - num_bytes:
                raise OSError(f"{num_bytes} bytes at {memory.offset} are not within {size.value}")
            theirs = _Bytes(pointer.value + memory.offset, num_bytes)
            copy.copy_(torch.as_tensor(theirs, device=device), non_blocking=True)
            stream.synchronize()
        finally:
            _call("cuIpcCloseMemHandle", pointer)
    return copy


class _Bytes:
    """Device memory as torch takes it over from others, without owning it."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class _Handle(ctypes.Structure):
    """Passed by value, as the driver wants it."""

    _fields_ = (("bytes", ctypes.c_byte * HANDLE_BYTES),)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    status = getattr(_driver(), name)(*args)
    if status:
        raise OSError(f"{name} failed with CUDA error {status}")
