"""Tensors between processes, on a device that does its copies as late as it may."""

import logging
import multiprocessing
import random
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from engine.errors import WireError
from engine.ipc.tensors import Exported, Packed, Parcel, TensorReceiver, TensorSender, Transport


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

    def describe(self, tensor: np.ndarray) -> tuple[str, list[int], int]:
        return str(tensor.dtype), list(tensor.shape), tensor.nbytes

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

    def map(self, handle: bytes) -> bytes:
        if handle not in self.memory.by_handle:
            raise OSError("invalid handle")
        self.mapped.append(handle)
        return handle

    def copy_out(self, mapped: bytes, offset: int, dtype: str, shape: list[int]) -> np.ndarray:
        copy = np.zeros(shape, dtype)
        if offset + copy.nbytes > len(self.memory.by_handle[mapped]):
            raise OSError("out of range")

        def fill() -> None:
            data = self.memory.by_handle[mapped][offset : offset + copy.nbytes]
            copy[...] = np.frombuffer(data, dtype).reshape(shape)

        self._late.append(fill)
        return copy

    def unmap(self, mapped: bytes) -> None:
        self.mapped.remove(mapped)

    def synchronize(self) -> None:
        late, self._late = self._late, []
        for work in late:
            work()


def pair(transport: Transport, **options: Any) -> tuple[TensorSender, TensorReceiver, FakeDevice]:
    memory = FakeMemory()
    device, theirs = FakeDevice(memory, **options), FakeDevice(memory)
    sender = TensorSender(device, transport, pool_bytes=4096)
    return sender, TensorReceiver(theirs), theirs


TRANSPORTS: list[Transport] = ["default", "cuda_ipc", "cuda_ipc_pool"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_arrive_and_loans_end(transport: Transport, seed: int) -> None:
    """Also while ranges are taken again at once: no copy is read before it is made."""
    dice = random.Random(seed)
    sender, receiver, device = pair(transport)
    assert sender.transport == transport
    for _ in range(300):
        sent = []
        for _ in range(dice.randint(1, 4)):
            shape = [dice.randint(0, 5), dice.randint(1, 20)]
            kind = dice.choice(["float32", "int64", "uint8"])
            tensor = np.asarray(np.random.default_rng(seed).integers(0, 99, shape), kind)
            sent.append((tensor, sender.pack(tensor.T.copy().T)))  # in another order
        got = [receiver.unpack(*packed) for _, packed in sent]
        sender.release(receiver.take_read())
        for (tensor, _), copy in zip(sent, got, strict=True):
            np.testing.assert_array_equal(tensor, copy)
        assert sender.num_lent == 0
    receiver.close()
    assert not device.mapped


def test_the_pool_is_mapped_once_and_its_memory_recycled() -> None:
    sender, receiver, device = pair("cuda_ipc_pool")
    for i in range(100):
        tensor = np.full(900, i, np.float32)  # one fits at a time
        copy = receiver.unpack(*sender.pack(tensor))
        sender.release(receiver.take_read())
        np.testing.assert_array_equal(copy, tensor)
    assert len(device.mapped) == 1 and len(device.memory.by_handle) == 1


def test_a_full_pool_lends_instead_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver, _ = pair("cuda_ipc_pool")
    tensors = [np.full(400, i, np.float32) for i in range(6)]
    with caplog.at_level(logging.WARNING):
        packed = [sender.pack(tensor) for tensor in tensors]
    assert len({each.parcel.handle for each in packed}) == 5  # the pool's two, four of their own
    assert [r for r in caplog.messages if "no room" in r] == caplog.messages
    assert len(caplog.messages) == 1
    got = [receiver.unpack(*each) for each in packed]
    sender.release(receiver.take_read())
    for tensor, copy in zip(tensors, got, strict=True):
        np.testing.assert_array_equal(tensor, copy)
    assert sender.pack(tensors[0]).parcel.handle == packed[0].parcel.handle  # room again


@pytest.mark.parametrize("options", [{"room": 100}, {"can_export": False}])
def test_a_pool_that_cannot_be_made_is_said_and_does_not_hurt(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        sender, receiver, _ = pair("cuda_ipc_pool", **options)
    assert sender.transport == "default"
    assert len(caplog.messages) == 1 and "through host memory" in caplog.messages[0]
    packed = sender.pack(np.arange(5))
    np.testing.assert_array_equal(receiver.unpack(*packed), np.arange(5))
    assert packed.parcel.handle == b"" and receiver.take_read() == []


def test_what_cannot_be_lent_travels_through_host_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender, receiver, _ = pair("cuda_ipc", can_export=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            np.testing.assert_array_equal(receiver.unpack(*sender.pack(np.arange(5))), range(5))
    assert len(caplog.messages) == 1 and sender.num_lent == 0


def test_wrong_parcels_and_loans_are_wire_errors() -> None:
    sender, receiver, _ = pair("cuda_ipc")
    with pytest.raises(WireError, match="cannot be read"):
        receiver.unpack(Parcel("int64", [5], b"no handle", 0, 1), b"")
    parcel = sender.pack(np.arange(5)).parcel
    with pytest.raises(WireError, match="cannot be read"):
        receiver.unpack(Parcel("int64", [500], parcel.handle, parcel.offset, parcel.loan), b"")
    for loan in (0, 2):
        with pytest.raises(WireError, match="not open"):
            sender.release([loan])


def _receive(line: Connection) -> None:
    """In a process of its own: read parcels, send the sums back."""
    from engine.ipc.cuda import CudaDevice

    receiver = TensorReceiver(CudaDevice())
    while (item := line.recv()) is not None:
        parcel, payload = item
        tensor = receiver.unpack(Parcel(*parcel), payload)
        loans = receiver.take_read()
        line.send((str(tensor.dtype), list(tensor.shape), float(tensor.double().sum()), loans))
    receiver.close()


@pytest.mark.gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_cross_processes_on_a_gpu(transport: Transport) -> None:
    import torch

    from engine.ipc.cuda import CudaDevice

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_receive, args=(theirs,))
    child.start()
    sender = TensorSender(CudaDevice(), transport, pool_bytes=1 << 20)
    assert sender.transport == transport
    for i in range(50):
        dtype = (torch.float32, torch.bfloat16, torch.int64)[i % 3]
        tensor = torch.full((i, 100 + i), i % 7, dtype=dtype, device="cuda").t()
        packed: Packed = sender.pack(tensor)
        parcel = packed.parcel
        fields = (parcel.dtype, parcel.shape, parcel.handle, parcel.offset, parcel.loan)
        ours.send((fields, packed.payload))
        assert ours.poll(60)
        kind, shape, total, loans = ours.recv()
        sender.release(loans)
        assert (kind, shape, total) == (str(dtype), [100 + i, i], (i % 7) * i * (100 + i))
        assert sender.num_lent == 0
    ours.send(None)
    child.join(60)
    assert child.exitcode == 0
