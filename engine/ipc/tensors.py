"""Tensors handed to another process of the machine, one way: an encoder's features to the worker.

    encoder: TensorLender                                worker: read_tensor
      lend(tensor) ──── TensorHandle, in a message ────> a tensor of its own
      release([loan]) <──── loan, in a message ─────────

A handle is some hundred bytes, whatever the size of its tensor. What lies in host memory is copied
to memory without a name, which the reader opens by process and descriptor (both run as one user); a
tensor on a GPU is lent where it lies (``ipc.cuda``) and must not change until it is released. A
loan ends with ``release``, with ``release_all`` if its reader has died, or with its lender, and
leaves nothing in the system. Reading copies, and what has ended is an error to read. Handles are
not trusted.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Iterable
from math import prod

import msgspec
import torch

from engine.errors import WireError
from engine.ipc import cuda
from engine.ipc.cuda import CudaMemory

logger = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_DIMS = 8
MAX_BYTES = 1 << 40  # of a shape that is empty too, had it one element where it has none
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # or it could shrink under us


class HostMemory(msgspec.Struct, array_like=True, frozen=True, tag="host"):
    """Memory that process ``pid`` holds open as descriptor ``fd``. ``name`` is used only once."""

    pid: int
    fd: int
    name: str


class TensorHandle(msgspec.Struct, array_like=True, frozen=True):
    """A tensor that is lent, its elements in C order. ``dtype`` is one of ``DTYPES``."""

    loan: int
    dtype: str
    shape: list[int]
    memory: HostMemory | CudaMemory


class TensorLender:
    """Owns what is lent to one reader. For one thread."""

    def __init__(self) -> None:
        self._lent: dict[int, torch.Tensor | int] = {}  # by loan; an int is a descriptor
        self._num_loans = 0
        self._has_warned_slow = False

    @property
    def num_lent(self) -> int:
        """Loans that are open, each with its memory and, in host memory, a descriptor."""
        return len(self._lent)

    def lend(self, tensor: torch.Tensor) -> TensorHandle:
        """The handle of a tensor of any device, to be released once it was read.

        Raises ``WireError`` for one of another type, or if there is no memory to lend.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise WireError(
                f"a {tensor.layout} tensor of {dtype} on {tensor.device} cannot be lent; make it a "
                f"dense one of {', '.join(DTYPES)}"
            )
        tensor = tensor.detach().contiguous()
        owned: torch.Tensor | int = tensor
        memory: HostMemory | CudaMemory | None = self._export(tensor) if tensor.is_cuda else None
        if memory is None:
            owned, memory = _copy_to_host(tensor)
        self._num_loans += 1
        self._lent[self._num_loans] = owned
        return TensorHandle(self._num_loans, dtype, list(tensor.shape), memory)

    def release(self, loans: Iterable[int]) -> None:
        """End loans that were read. Raises ``WireError`` for one that is not open."""
        for loan in loans:
            if loan not in self._lent:
                raise WireError(f"loan {loan} of a tensor is not open")
            owned = self._lent.pop(loan)
            if isinstance(owned, int):
                os.close(owned)

    def release_all(self) -> None:
        """End every loan: the reader has died, or the lender ends."""
        self.release(list(self._lent))

    def _export(self, tensor: torch.Tensor) -> CudaMemory | None:
        if not tensor.numel():
            return None
        try:
            return cuda.export(tensor)
        except OSError as error:
            if not self._has_warned_slow:
                self._has_warned_slow = True
                logger.warning("tensors go through host memory, this is said once: %s", error)
            return None


def read_tensor(handle: TensorHandle, device: torch.device) -> torch.Tensor:
    """A copy of what was lent, on ``device``; it is complete when this returns.

    Its loan is to be released, also if this raises ``WireError``: for a handle that is wrong, that
    was released or whose lender has ended, and for GPU memory if ``device`` is none.
    """
    if handle.dtype not in DTYPES:
        raise WireError(f"{handle.dtype!r:.80} is no type of a tensor that is lent")
    dtype, shape = DTYPES[handle.dtype], handle.shape
    is_shape = len(shape) <= MAX_DIMS and min(shape, default=0) >= 0
    if not is_shape or prod(max(1, length) for length in shape) * dtype.itemsize > MAX_BYTES:
        raise WireError(f"{shape!r:.80} is no shape of a tensor that is lent")
    num_bytes = prod(shape) * dtype.itemsize
    try:
        if not num_bytes:
            flat = torch.empty(0, dtype=torch.uint8, device=device)
        elif isinstance(handle.memory, CudaMemory):
            flat = cuda.copy_of(handle.memory, num_bytes, device)
        else:
            flat = _mapped(handle.memory, num_bytes).to(device, copy=True)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        raise WireError(f"a tensor that was lent cannot be read: {error}") from error
    return flat.view(dtype).reshape(shape)


def _copy_to_host(tensor: torch.Tensor) -> tuple[int, HostMemory]:
    """Memory with the bytes of a contiguous tensor, and its descriptor, which keeps it."""
    name = f"metronome-tensor-{secrets.token_hex(8)}"
    num_bytes = tensor.numel() * tensor.element_size()
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)  # no memory is an error here, a signal later
                there = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=tensor.dtype)
                there.copy_(tensor.reshape(-1))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise WireError(f"there is no memory to lend {num_bytes} bytes: {error}") from error
    return fd, HostMemory(os.getpid(), fd, name)


def _mapped(memory: HostMemory, num_bytes: int) -> torch.Tensor:
    """The first bytes of another process's memory, without a copy; it cannot be written to.

    [num_bytes] uint8. Raises ``OSError`` if it is not there (any more).
    """
    path = f"/proc/{memory.pid}/fd/{memory.fd}"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.readlink(f"/proc/self/fd/{fd}")
        if found != f"/memfd:{memory.name} (deleted)":
            raise OSError(f"it was released: {path} is {found}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size < num_bytes:
            raise OSError(f"{path} has no {num_bytes} bytes that stay")
        # A private mapping: torch wants to be able to write.
        return torch.frombuffer(
            mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8
        )
    finally:
        os.close(fd)
