"""Tensors between processes, on a device that does its copies as late as it may."""

import logging
import multiprocessing
import random
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support.fake_device import FakeDevice, FakeMemory, Note

from engine.errors import ConfigError, WireError
from engine.ipc.channel import Channel
from engine.ipc.tensor_channel import TensorChannel
from engine.ipc.tensors import (
    Parcel,
    TensorReceiver,
    TensorSender,
    Transport,
)


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
            kind = dice.choice(["float32", "int64", "uint8", "bool", "float16"])
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
        sender.pack(np.zeros(500, np.float32))  # of another size, and nothing new
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


def test_what_was_lent_is_let_go_of_before_it_is_acknowledged() -> None:
    """Its sender may free it at once; to have it mapped then is undefined on a device."""
    sender, receiver, device = pair("cuda_ipc")
    for _ in range(20):
        receiver.unpack(*sender.pack(np.arange(5)))
    assert len(device.mapped) == 20
    assert receiver.take_read() == list(range(1, 21))
    assert not device.mapped


def test_the_loans_of_a_dead_receiver_come_back() -> None:
    sender, receiver, _ = pair("cuda_ipc_pool")
    for _ in range(7):
        sender.pack(np.zeros(400, np.float32))
    assert sender.num_lent == 7
    sender.release_all()
    assert sender.num_lent == 0
    packed = sender.pack(np.full(1024, 5, np.float32))  # all of the pool
    assert packed.parcel.is_pooled
    np.testing.assert_array_equal(as_read(receiver, packed), np.full(1024, 5, np.float32))


def as_read(receiver: TensorReceiver, packed: Any) -> np.ndarray:
    tensor: np.ndarray = receiver.unpack(*packed)
    receiver.take_read()
    return tensor


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_has_no_elements_is_lent_by_nobody(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver, _ = pair(transport, can_export=transport != "cuda_ipc")
    with caplog.at_level(logging.WARNING):
        for shape in ([0], [3, 0], [0, 1 << 20]):
            found = receiver.unpack(*sender.pack(np.zeros(shape, np.int16)))
            assert (found.dtype, list(found.shape)) == (np.int16, shape)
    assert sender.num_lent == 0 and not caplog.messages


def test_a_transport_or_a_pool_that_is_none_is_refused() -> None:
    device = FakeDevice(FakeMemory())
    with pytest.raises(ConfigError, match=r"'nvlink'.*cuda_ipc_pool"):
        TensorSender(device, "nvlink")  # type: ignore[arg-type]
    for size in (0, -1):
        with pytest.raises(ConfigError, match=str(size)):
            TensorSender(device, "cuda_ipc_pool", pool_bytes=size)


def test_a_type_that_does_not_travel_is_named() -> None:
    sender, _, _ = pair("default")
    with pytest.raises(WireError, match=r"complex64.*bfloat16"):
        sender.pack(np.zeros(3, np.complex64))
    assert sender.num_lent == 0


HOSTILE: list[tuple[str, list[int], int]] = [
    ("complex64", [1], 0),
    ("float", [1], 0),
    ("quint8", [1], 0),
    ("__class__", [1], 0),
    ("", [1], 0),
    ("int64", [-1], 0),
    ("int64", [-5, -1], 0),
    ("int64", [1 << 31, 1 << 31], 0),
    ("int64", [1 << 61], 0),
    ("int64", [(1 << 62) + 1, 4], 0),
    ("int64", [1 << 32, 1 << 32], 0),
    ("int64", [0, 1 << 62], 0),
    ("int64", [1] * 65, 0),
    ("int64", [513], 0),
    ("int64", [5], -8),
    ("int64", [5], 1 << 62),
    ("int64", [5], 4096 - 32),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_parcel_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Sizes are whole numbers of any length; nothing is allocated, nothing read elsewhere."""
    dtype, shape, offset = HOSTILE[number]
    sender, receiver, device = pair("cuda_ipc_pool")
    parcel = sender.pack(np.arange(512)).parcel

    def never(*_: object) -> None:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(device, "copy_out", never)
    monkeypatch.setattr(device, "from_host", never)
    with pytest.raises(WireError):
        receiver.unpack(Parcel(dtype, shape, parcel.handle, offset, parcel.loan, True), b"")
    assert receiver.take_read() == [parcel.loan]  # which ends all the same
    with pytest.raises(WireError):
        receiver.unpack(Parcel(dtype, shape), b"x" * 24)


def test_wrong_handles_and_loans_are_wire_errors() -> None:
    sender, receiver, _ = pair("cuda_ipc")
    with pytest.raises(WireError, match="cannot be read"):
        receiver.unpack(Parcel("int64", [5], b"no handle", 0, 1), b"")
    sender.pack(np.arange(5))
    for loan in (0, 2):
        with pytest.raises(WireError, match="not open"):
            sender.release([loan])


def channel_on(device: Any, transport: Transport = "default") -> TensorChannel[Note]:
    sender = TensorSender(device, transport, pool_bytes=1 << 20)
    return TensorChannel(Channel(Note, None, None), sender, TensorReceiver(device))


def _answer(line: Connection) -> None:
    """In a process of its own: read tensors, send back what comes behind them."""
    from engine.ipc.cuda import CudaDevice

    channel = channel_on(CudaDevice())
    while (frames := line.recv()) is not None:
        message, tensors = channel.unpack(frames)
        line.send(channel.pack(message, [tensor + 1 for tensor in tensors]))
    channel.close()


@pytest.mark.gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_cross_processes_on_a_gpu(transport: Transport) -> None:
    import torch

    from engine.ipc.cuda import CudaDevice

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_answer, args=(theirs,))
    child.start()
    sender = TensorSender(CudaDevice(), transport, pool_bytes=1 << 20)
    assert sender.transport == transport
    channel = TensorChannel(Channel[Note](Note, None, None), sender, TensorReceiver(CudaDevice()))
    for i in range(50):
        dtype = (torch.float32, torch.bfloat16, torch.int64)[i % 3]
        tensor = torch.full((i, 100 + i), i % 7, dtype=dtype, device="cuda").t()
        ours.send(channel.pack(Note(str(i)), [tensor, tensor[0]]))
        assert ours.poll(60)
        message, answers = channel.unpack(ours.recv())
        assert message == Note(str(i)) and sender.num_lent == 0
        assert torch.equal(answers[0], tensor + 1) and torch.equal(answers[1], tensor[0] + 1)
    ours.send(None)
    child.join(60)
    assert child.exitcode == 0
