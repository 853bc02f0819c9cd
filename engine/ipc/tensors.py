"""Tensors from one process to another: through host memory, by lending, or through a device pool.

    default          copied to host memory; the bytes travel beside the message (``ipc.channel``)
    cuda_ipc         the sender's allocation is lent until the receiver has copied from it
    cuda_ipc_pool    copied into a pool that both map once; its ranges are recycled

A loan ends with its acknowledgement, which a receiver may give only once its copy is done on the
device and the memory is no longer mapped: ``take_read`` waits for that. What a transport cannot do
the next simpler one does, and says so once. This module knows no device (``ipc.host_tensors`` and
``ipc.cuda`` do), and trusts no parcel. ``ipc.tensor_channel`` is the way to use it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec

from engine.errors import ConfigError, WireError
from engine.ipc.shm import Ranges

logger = logging.getLogger(__name__)

Transport = Literal["default", "cuda_ipc", "cuda_ipc_pool"]
POOL_BYTES = 512 << 20
MAX_DIMS = 32
MAX_BYTES = 1 << 40  # of an empty tensor too, had it one element where it has none
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Types that travel, by the names torch and numpy have for them."""


class Parcel(msgspec.Struct, array_like=True, frozen=True):
    """A tensor on its way, its elements in C order.

    ``handle`` names an allocation to map, ``offset`` (bytes) where in it the tensor lies. Without a
    handle its bytes are a payload. ``loan`` is to be acknowledged. ``is_pooled``: the allocation
    is a pool, to be mapped once.
    """

    dtype: str
    shape: list[int]
    handle: bytes = b""
    offset: int = 0
    loan: int = 0
    is_pooled: bool = False


class Exported(NamedTuple):
    """Device memory that others may map: the handle of an allocation, and bytes into it."""

    handle: bytes
    offset: int


class Mapped(NamedTuple):
    """Memory of another process; ``memory`` is whatever the device knows it by."""

    memory: Any
    num_bytes: int


class Described(NamedTuple):
    """Type, shape, and size in bytes of a tensor."""

    dtype: str
    shape: list[int]
    num_bytes: int


class Device(Protocol):
    """What a device must do. Copies may run on after their call; ``synchronize`` waits for them.

    Methods raise ``OSError`` for what the device refuses.
    """

    def describe(self, tensor: Any) -> Described: ...
    def contiguous(self, tensor: Any) -> Any:
        """The tensor in C order, itself if it is. Raises ``WireError`` for one that is no plain
        block of numbers."""

    def to_host(self, tensor: Any) -> bytes: ...
    def from_host(self, data: bytes, dtype: str, shape: list[int]) -> Any:
        """``data`` is exactly as long as type and shape say, here and in ``copy_out``."""

    def allocate(self, num_bytes: int) -> Any:
        """Memory that can be exported."""

    def export(self, memory: Any) -> Exported:
        """``memory`` is a tensor, or what ``allocate`` returned."""

    def copy_in(self, memory: Any, offset: int, tensor: Any) -> None: ...
    def map(self, handle: bytes) -> Mapped: ...
    def copy_out(self, mapped: Mapped, offset: int, dtype: str, shape: list[int]) -> Any:
        """A new tensor with a copy of what lies there."""

    def unmap(self, mapped: Mapped) -> None: ...
    def synchronize(self) -> None:
        """Wait for all copies, and for what the caller's stream is doing."""


class Packed(NamedTuple):
    """A parcel, and the payload beside it (empty unless it travels through host memory)."""

    parcel: Parcel
    payload: bytes


class TensorSender:
    """Owns the pool and what is lent to one receiver. ``transport`` is what is used after any
    fallback.

    Raises ``ConfigError`` for an unknown transport, or a pool without room.
    """

    def __init__(
        self, device: Device, transport: Transport, *, pool_bytes: int = POOL_BYTES
    ) -> None:
        if transport not in get_args(Transport):
            known = ", ".join(get_args(Transport))
            raise ConfigError(
                f"tensor transport {transport!r:.80} is unknown; choose one of: {known}"
            )
        if pool_bytes <= 0:
            raise ConfigError(f"a tensor pool of {pool_bytes} bytes must have at least one")
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
        """Loans that are not acknowledged yet. Their memory must stay valid that long: a sender may
        end once there are none, or its receiver has ended."""
        return len(self._lent)

    def pack(self, tensor: Any) -> Packed:
        """How this tensor travels. It may be changed by its owner once this has returned, unless
        the transport is ``cuda_ipc``. Raises ``WireError`` for one of a type that does not."""
        tensor = self._device.contiguous(tensor)
        described = self._device.describe(tensor)
        if described.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise WireError(f"a tensor of type {described.dtype} cannot travel; these can: {known}")
        packed = None
        if self.transport == "cuda_ipc_pool" and described.num_bytes:
            packed = self._pack_in_pool(tensor, described)
        if packed is None and self.transport != "default" and described.num_bytes:
            packed = self._lend(tensor, described)
        if packed is None:
            parcel = Parcel(described.dtype, described.shape)
            packed = Packed(parcel, self._device.to_host(tensor))
        return packed

    def release(self, loans: Iterable[int]) -> None:
        """End loans. Raises ``WireError`` for a loan that is not open."""
        for loan in loans:
            if loan not in self._lent:
                raise WireError(f"loan {loan} of a tensor is not open")
            lent = self._lent.pop(loan)
            if isinstance(lent, PoolRange):
                self._ranges.give(*lent)

    def release_all(self) -> None:
        """End every loan: its receiver has died, and reads no more."""
        self.release(list(self._lent))

    def _open_pool(self, num_bytes: int) -> None:
        try:
            self._pool = self._device.allocate(num_bytes)
            self._pool_at = self._device.export(self._pool)
        except OSError as error:
            self.transport = "default"
            self._say("pool", f"no tensor pool of {num_bytes} bytes ({error}): through host memory")
        else:
            self._ranges = Ranges(num_bytes)

    def _pack_in_pool(self, tensor: Any, described: Described) -> Packed | None:
        dtype, shape, num_bytes = described
        offset = self._ranges.take(num_bytes)
        if offset is None:
            self._say("room", f"the tensor pool has no room for {num_bytes} bytes: lent one by one")
            return None
        loan = self._lends(PoolRange(offset, num_bytes))
        self._device.copy_in(self._pool, offset, tensor)
        self._device.synchronize()  # or the receiver may read before it is there
        handle, base = self._pool_at
        return Packed(Parcel(dtype, shape, handle, base + offset, loan, True), b"")

    def _lend(self, tensor: Any, described: Described) -> Packed | None:
        try:
            handle, offset = self._device.export(tensor)
        except OSError as error:
            self._say("lend", f"a tensor cannot be lent ({error}): through host memory")
            return None
        self._device.synchronize()
        loan = self._lends(tensor)
        return Packed(Parcel(described.dtype, described.shape, handle, offset, loan), b"")

    def _lends(self, what: Any) -> int:
        self._num_loans += 1
        self._lent[self._num_loans] = what
        return self._num_loans

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s (said once)", message)


class PoolRange(NamedTuple):
    """Bytes of a pool that are lent."""

    offset: int
    length: int


class TensorReceiver:
    """Makes tensors of the parcels of one sender; remembers which loans they were read from."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mapped: dict[bytes, Mapped] = {}  # by handle
        self._pool = b""  # the handle that stays mapped
        self._read: list[int] = []

    def unpack(self, parcel: Parcel, payload: bytes) -> Any:
        """A tensor of our own. Raises ``WireError`` for a parcel that cannot be opened; its loan
        ends all the same."""
        if parcel.handle:
            self._read.append(parcel.loan)
        num_bytes = num_bytes_of(parcel)
        if not parcel.handle:
            if len(payload) != num_bytes:
                raise WireError(
                    f"{len(payload)} bytes are no {parcel.dtype} tensor of {parcel.shape}: that "
                    f"has {num_bytes}"
                )
            return self._device.from_host(payload, parcel.dtype, parcel.shape)
        try:
            mapped = self._map(parcel)
            if not 0 <= parcel.offset <= mapped.num_bytes - num_bytes:
                raise OSError(
                    f"{num_bytes} bytes at {parcel.offset} are not within {mapped.num_bytes}"
                )
            return self._device.copy_out(mapped, parcel.offset, parcel.dtype, parcel.shape)
        except OSError as error:
            raise WireError(f"a tensor that was lent cannot be read: {error}") from error

    def take_read(self) -> list[int]:
        """Loans to acknowledge: the copies from them are done when this returns, and nothing is
        mapped that their sender may now let go of."""
        if self._read:
            self._device.synchronize()
            for handle in self._mapped.keys() - {self._pool}:
                self._device.unmap(self._mapped.pop(handle))
        read, self._read = self._read, []
        return read

    def close(self) -> None:
        """Let go of the sender's memory; harmless when repeated."""
        self._device.synchronize()
        while self._mapped:
            self._device.unmap(self._mapped.popitem()[1])

    def _map(self, parcel: Parcel) -> Mapped:
        mapped = self._mapped.get(parcel.handle)
        if mapped is None:
            mapped = self._mapped[parcel.handle] = self._device.map(parcel.handle)
        if parcel.is_pooled:
            self._pool = parcel.handle
        return mapped


def num_bytes_of(parcel: Parcel) -> int:
    """The size a parcel claims. Raises ``WireError`` for an invalid type or shape."""
    if parcel.dtype not in ITEM_BYTES:
        raise WireError(f"{parcel.dtype!r:.80} is no type of tensors that travel")
    item, shape = ITEM_BYTES[parcel.dtype], parcel.shape
    is_shape = len(shape) <= MAX_DIMS and min(shape, default=0) >= 0
    if not is_shape or prod(max(1, length) for length in shape) * item > MAX_BYTES:
        raise WireError(f"{shape!r:.80} is no shape of a tensor")
    return prod(shape) * item
