"""Messages with tensors: in frames, in shared memory, or lent by a device."""

import os
import random
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_device import FakeDevice, FakeMemory, Note

from engine.errors import WireError
from engine.ipc.channel import Channel
from engine.ipc.cuda import CudaDevice
from engine.ipc.host_tensors import HostDevice
from engine.ipc.shm import Arena, ArenaReader, create_memory
from engine.ipc.tensor_channel import TensorChannel
from engine.ipc.tensors import ITEM_BYTES, TensorReceiver, TensorSender, Transport

ARENA = 1 << 16
TRANSPORTS: list[Transport] = ["default", "cuda_ipc", "cuda_ipc_pool"]


class Pair:
    """Both sides of a channel in one process."""

    def __init__(
        self, devices: tuple[Any, Any], transport: Transport = "default", arena: int = ARENA
    ) -> None:
        fds = [create_memory(arena) for _ in range(2)] if arena else []
        self.arenas = [Arena(fd, "arena of the test") for fd in fds]
        self.senders = [TensorSender(device, transport, pool_bytes=4096) for device in devices]
        self.one, self.two = (
            TensorChannel(
                Channel[Note](
                    Note,
                    self.arenas[i] if fds else None,
                    ArenaReader(fds[1 - i]) if fds else None,
                ),
                self.senders[i],
                TensorReceiver(devices[i]),
            )
            for i in range(2)
        )
        for fd in fds:
            os.close(fd)

    def send(self, *tensors: Any) -> list[Any]:
        """There, and acknowledged by what comes back."""
        message, found = self.two.unpack(self.one.pack(Note("there"), tensors))
        assert message == Note("there")
        assert self.one.unpack(self.two.pack(Note("back"))) == (Note("back"), [])
        assert self.senders[0].num_lent == 0
        assert not any(arena.num_lent for arena in self.arenas[:1])
        return found


def host_pair(arena: int = ARENA) -> Pair:
    return Pair((HostDevice(), HostDevice()), arena=arena)


def fake_pair(transport: Transport) -> Pair:
    memory = FakeMemory()
    return Pair((FakeDevice(memory), FakeDevice(memory)), transport, arena=0)


def random_tensor(dice: random.Random, name: str) -> torch.Tensor:
    """Any bytes there are, in any shape, often a view that is not contiguous."""
    shape = [dice.choice([0, 1, 1, 2, 3, 17]) for _ in range(dice.randint(0, 4))]
    data = torch.tensor(list(dice.randbytes(prod(shape) * ITEM_BYTES[name])), dtype=torch.uint8)
    flat = data > 127 if name == "bool" else data.view(getattr(torch, name))
    tensor = flat.reshape(shape)
    if shape:
        views = [tensor, tensor.transpose(0, -1), tensor[::2], tensor.expand(2, *shape)]
        tensor = dice.choice(views)
    return tensor


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ITEM_BYTES)
@pytest.mark.parametrize("arena", [0, ARENA])
def test_tensors_of_every_type_and_shape_arrive_bit_by_bit(
    seed: int, name: str, arena: int
) -> None:
    dice = random.Random(seed)
    pair = host_pair(arena)
    for _ in range(40):
        sent = [random_tensor(dice, name) for _ in range(dice.randint(0, 4))]
        for one, other in zip(sent, pair.send(*sent), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert as_bytes(one) == as_bytes(other)


def test_large_tensors_lie_in_shared_memory() -> None:
    pair = host_pair()
    tensor = torch.arange(5000, dtype=torch.int64)
    frames = pair.one.pack(Note("large"), [tensor])
    assert sum(map(len, frames)) < 1000 and pair.arenas[0].num_lent == 1
    assert torch.equal(pair.two.unpack(frames).tensors[0], tensor)


def test_what_arrives_is_the_receivers_own() -> None:
    (found,) = host_pair().send(torch.zeros(5, requires_grad=True))
    found += 1  # it can be written, and no graph is behind it
    assert not found.requires_grad


@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_ipc_pool"])
def test_without_a_device_all_goes_through_host_memory(transport: Transport) -> None:
    pair = Pair((HostDevice(), HostDevice()), transport)
    assert torch.equal(pair.send(torch.ones(3))[0], torch.ones(3))


@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_ipc_pool"])
def test_where_cuda_is_missing_it_is_said_and_does_not_hurt(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    sender, receiver = TensorSender(CudaDevice(), transport), TensorReceiver(HostDevice())
    for _ in range(2):
        assert torch.equal(receiver.unpack(*sender.pack(torch.ones(3))), torch.ones(3))
    assert len(caplog.messages) == 1 and "through host memory" in caplog.messages[0]


@pytest.mark.parametrize("kind", ["sparse", "meta", "complex"])
def test_what_is_no_plain_block_of_numbers_is_refused(kind: str) -> None:
    tensor = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
        "complex": lambda: torch.zeros(3, dtype=torch.complex64),
    }[kind]()
    pair = host_pair()
    with pytest.raises(WireError, match="cannot travel"):
        pair.one.pack(Note("x"), [torch.zeros(3), tensor])
    assert pair.senders[0].num_lent == 0
    assert torch.equal(pair.send(torch.ones(3))[0], torch.ones(3))


def test_a_truth_value_is_one_whatever_comes() -> None:
    found = HostDevice().from_host(bytes([0, 1, 2, 255]), "bool", [4])
    assert found.view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_loans_end_with_the_next_message_back(transport: Transport, seed: int) -> None:
    dice = random.Random(seed)
    pair = fake_pair(transport)
    for number in range(200):
        sent = [np.full(dice.randint(0, 700), number, np.float32) for _ in range(3)]
        for one, other in zip(sent, pair.send(*sent), strict=True):
            np.testing.assert_array_equal(one, other)


def test_nothing_stays_lent_for_a_message_that_cannot_travel() -> None:
    pair = fake_pair("cuda_ipc_pool")
    pair.two.unpack(pair.one.pack(Note("x"), [np.arange(5)]))
    with pytest.raises(WireError):
        pair.two.pack(Note(object()), [np.arange(5)])  # type: ignore[arg-type]
    assert pair.senders[1].num_lent == 0
    pair.one.unpack(pair.two.pack(Note("y")))  # what was read is acknowledged with the next one
    assert pair.senders[0].num_lent == 0


def test_one_wrong_tensor_costs_its_message_and_no_loan() -> None:
    memory = FakeMemory()
    pair = Pair((FakeDevice(memory), FakeDevice(memory)), "cuda_ipc", arena=0)
    frames = pair.one.pack(Note("x"), [np.arange(5), np.arange(5), np.arange(5)])
    del memory.by_handle[b"handle 1"]
    with pytest.raises(WireError, match="cannot be read"):
        pair.two.unpack(frames)
    pair.one.unpack(pair.two.pack(Note("back")))
    assert pair.senders[0].num_lent == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mutated_messages_are_wire_errors_only(transport: Transport, seed: int) -> None:
    dice = random.Random(seed)
    pair, num_refused = fake_pair(transport), 0
    for _ in range(1000):
        packed = pair.one.pack(Note("a"), [np.arange(9), np.zeros((2, 0), np.int8)])
        frames = [bytearray(frame) for frame in packed]
        for _ in range(dice.randint(1, 3)):
            frame = dice.choice(frames)
            if frame:
                frame[dice.randrange(len(frame))] = dice.randrange(256)
        try:
            pair.two.unpack([bytes(frame) for frame in frames])
            pair.one.unpack(pair.two.pack(Note("b")))
        except WireError:
            num_refused += 1
            pair = fake_pair(transport)
    assert 0 < num_refused < 1000
