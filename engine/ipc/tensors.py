"""Tensors from one process to another: through host memory, by lending, or through a device pool.

    default          copied to host memory; the bytes travel beside the message (``ipc.channel``)
    cuda_ipc         the sender's allocation is lent until the receiver has copied from it
    cuda_ipc_pool    copied into a pool that both map once; its ranges are recycled

A loan ends with its acknowledgement, which a receiver may give only once its copy is done on the
device: ``take_read`` waits for that. What a transport cannot do the next simpler one does, and says
so once. This module knows no device; ``ipc.cuda`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from engine.errors import WireError
from engine.ipc.shm import Ranges

logger = logging.getLogger(__name__)

Transport = Literal["default", "cuda_ipc", "cuda_ipc_pool"]
POOL_BYTES = 512 << 20


class Parcel(msgspec.Struct, array_like=True, frozen=True):
    """A tensor on its way, its elements in C order.

    ``handle`` names an allocation to map, ``offset`` (bytes) where in it the tensor lies. Without a
    handle its bytes are a payload. ``loan`` is to be acknowledged.
    """

    dtype: str
    shape: list[int]
    handle: bytes = b""
    offset: int = 0
    loan: int = 0


class Exported(NamedTuple):
    """Device memory that others may map: the handle of an allocation, and bytes into it."""

    handle: bytes
    offset: int


class Device(Protocol):
    """What a device must do. Copies may run on after their call, in order; ``synchronize`` waits.

    Methods raise ``OSError`` for what the device refuses.
    """

    def describe(self, tensor: Any) -> tuple[str, list[int], int]:
        """Name of its type, shape, and size in bytes."""

    def contiguous(self, tensor: Any) -> Any:
        """The tensor in C order, itself if it is."""

    def to_host(self, tensor: Any) -> bytes: ...
    def from_host(self, data: bytes, dtype: str, shape: list[int]) -> Any: ...
    def allocate(self, num_bytes: int) -> Any:
        """Memory that can be exported."""

    def export(self, memory: Any) -> Exported:
        """``memory`` is a tensor, or what ``allocate`` returned."""

    def copy_in(self, memory: Any, offset: int, tensor: Any) -> None: ...
    def map(self, handle: bytes) -> Any: ...
    def copy_out(self, mapped: Any, offset: int, dtype: str, shape: list[int]) -> Any:
        """A new tensor with a copy of what lies there."""

    def unmap(self, mapped: Any) -> None: ...
    def synchronize(self) -> None: ...


class Packed(NamedTuple):
    """A parcel, and the payload beside it (empty unless it travels through host memory)."""

    parcel: Parcel
    payload: bytes


class TensorSender:
    """Owns the pool and what is lent. ``transport`` is what is used after any fallback."""

    def __init__(
        self, device: Device, transport: Transport, *, pool_bytes: int = POOL_BYTES
    ) -> None:
        self.transport = transport
        self._device = device
        self._ranges = Ranges(0)
        self._lent: dict[int, Any] = {}  # loan -> a tensor, or a range of the pool
        self._num_loans = 0
        self._said: set[str] = set()
        if transport == "cuda_ipc_pool":
            self._open_pool(pool_bytes)

    @property
    def num_lent(self) -> int:
        """Loans that nobody has acknowledged yet."""
        return len(self._lent)

    def pack(self, tensor: Any) -> Packed:
        """How this tensor travels. It may be changed by its owner once this has returned, unless
        the transport is ``cuda_ipc``."""
        tensor = self._device.contiguous(tensor)
        packed = None
        if self.transport == "cuda_ipc_pool":
            packed = self._pack_in_pool(tensor)
        if packed is None and self.transport != "default":
            packed = self._lend(tensor)
        if packed is None:
            dtype, shape, _ = self._device.describe(tensor)
            packed = Packed(Parcel(dtype, shape), self._device.to_host(tensor))
        return packed

    def release(self, loans: Iterable[int]) -> None:
        """End loans. Raises ``WireError`` for one that is none."""
        for loan in loans:
            if loan not in self._lent:
                raise WireError(f"loan {loan} of a tensor is not open")
            lent = self._lent.pop(loan)
            if isinstance(lent, PoolRange):
                self._ranges.give(*lent)

    def _open_pool(self, num_bytes: int) -> None:
        try:
            self._pool = self._device.allocate(num_bytes)
            self._pool_at = self._device.export(self._pool)
        except OSError as error:
            self.transport = "default"
            self._say(f"no tensor pool of {num_bytes} bytes ({error}): through host memory")
        else:
            self._ranges = Ranges(num_bytes)

    def _pack_in_pool(self, tensor: Any) -> Packed | None:
        dtype, shape, num_bytes = self._device.describe(tensor)
        offset = self._ranges.take(num_bytes)
        if offset is None:
            self._say(f"the tensor pool has no room for {num_bytes} bytes: lent one by one")
            return None
        self._device.copy_in(self._pool, offset, tensor)
        self._device.synchronize()  # or the receiver may read before it is there
        loan = self._lends(PoolRange(offset, num_bytes))
        handle, base = self._pool_at
        return Packed(Parcel(dtype, shape, handle, base + offset, loan), b"")

    def _lend(self, tensor: Any) -> Packed | None:
        try:
            handle, offset = self._device.export(tensor)
        except OSError as error:
            self._say(f"a tensor cannot be lent ({error}): through host memory")
            return None
        self._device.synchronize()
        dtype, shape, _ = self._device.describe(tensor)
        return Packed(Parcel(dtype, shape, handle, offset, self._lends(tensor)), b"")

    def _lends(self, what: Any) -> int:
        self._num_loans += 1
        self._lent[self._num_loans] = what
        return self._num_loans

    def _say(self, message: str) -> None:
        kind = message.split("(")[0]
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s (said once)", message)


class PoolRange(NamedTuple):
    """Bytes of a pool that are lent."""

    offset: int
    length: int


class TensorReceiver:
    """Makes tensors of parcels; remembers which loans they were read from."""

    def __init__(self, device: Device, *, max_mapped: int = 8) -> None:
        self._device = device
        self._max_mapped = max_mapped
        self._mapped: dict[bytes, Any] = {}  # by handle, the one used last at the end
        self._read: list[int] = []

    def unpack(self, parcel: Parcel, payload: bytes) -> Any:
        """A tensor of our own. Raises ``WireError`` for a parcel that cannot be opened."""
        if not parcel.handle:
            return self._device.from_host(payload, parcel.dtype, parcel.shape)
        try:
            mapped = self._map(parcel.handle)
            tensor = self._device.copy_out(mapped, parcel.offset, parcel.dtype, parcel.shape)
        except OSError as error:
            raise WireError(f"a tensor that was lent cannot be read: {error}") from error
        self._read.append(parcel.loan)
        return tensor

    def take_read(self) -> list[int]:
        """Loans to acknowledge: the copies from them are done when this returns."""
        if self._read:
            self._device.synchronize()
        read, self._read = self._read, []
        return read

    def close(self) -> None:
        """Let go of the sender's memory; harmless when repeated."""
        self._device.synchronize()
        while self._mapped:
            self._device.unmap(self._mapped.popitem()[1])

    def _map(self, handle: bytes) -> Any:
        mapped = self._mapped.pop(handle, None)
        if mapped is None:
            mapped = self._device.map(handle)
        self._mapped[handle] = mapped
        if len(self._mapped) > self._max_mapped:
            self._device.synchronize()  # copies from it may still run
            oldest = next(iter(self._mapped))
            self._device.unmap(self._mapped.pop(oldest))
        return mapped
