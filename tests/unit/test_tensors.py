"""Tensors that are lent in host memory, both sides in one process.

Processes and a GPU: ``tests/contract/test_lent_tensors.py``.
"""

import os
import random
from math import prod
from pathlib import Path

import pytest
import torch

from engine.errors import WireError
from engine.ipc.codec import Decoder, Encoder
from engine.ipc.cuda import CudaMemory
from engine.ipc.tensors import DTYPES, HostMemory, TensorHandle, TensorLender, read_tensor

CPU = torch.device("cpu")


def travel(handle: TensorHandle) -> TensorHandle:
    decoder: Decoder[TensorHandle] = Decoder(TensorHandle)
    return decoder.decode([Encoder().encode(handle)])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def random_tensor(dice: random.Random, name: str) -> torch.Tensor:
    """Any bytes there are, in any shape, often a view that is not contiguous."""
    shape = [dice.choice([0, 1, 1, 2, 3, 17]) for _ in range(dice.randint(0, 4))]
    num_bytes = prod(shape) * DTYPES[name].itemsize
    data = torch.tensor(list(dice.randbytes(num_bytes)), dtype=torch.uint8)
    tensor = data.view(DTYPES[name]).reshape(shape)
    if shape:
        views = [tensor, tensor.transpose(0, -1), tensor[::2], tensor.expand(2, *shape)]
        tensor = dice.choice(views)
    return tensor


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_type_and_shape_arrive_bit_by_bit(seed: int, name: str) -> None:
    dice, lender, before = random.Random(seed), TensorLender(), descriptors()
    open_loans: list[tuple[torch.Tensor, TensorHandle]] = []
    for _ in range(200):
        tensor = random_tensor(dice, name)
        open_loans.append((tensor, travel(lender.lend(tensor))))
        while open_loans and dice.random() < 0.5:
            sent, handle = open_loans.pop(dice.randrange(len(open_loans)))
            found = read_tensor(handle, CPU)
            assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
            assert as_bytes(found) == as_bytes(sent)
            lender.release([handle.loan])
        assert lender.num_lent == len(open_loans)
    lender.release_all()
    assert lender.num_lent == 0 and descriptors() == before


def test_a_handle_is_small_and_its_memory_has_no_name() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    handle = TensorLender().lend(torch.zeros(1 << 20))
    assert len(Encoder().encode(handle)) < 100
    assert sorted(Path("/dev/shm").iterdir()) == before


def test_either_side_may_write_to_what_is_its_own() -> None:
    lender, sent = TensorLender(), torch.zeros(5, requires_grad=True)
    handle = lender.lend(sent)
    with torch.no_grad():
        sent += 1
    found = read_tensor(handle, CPU)
    found += 2
    assert not found.requires_grad and found.tolist() == [2.0] * 5
    assert read_tensor(handle, CPU).tolist() == [0.0] * 5
    lender.release_all()
    assert found.tolist() == [2.0] * 5


def test_what_was_released_is_never_the_bytes_of_another() -> None:
    lender = TensorLender()
    old = lender.lend(torch.ones(3))
    lender.release([old.loan])
    with pytest.raises(WireError, match="cannot be read"):
        read_tensor(old, CPU)
    new = lender.lend(torch.zeros(3))
    assert isinstance(old.memory, HostMemory) and isinstance(new.memory, HostMemory)
    assert old.memory.fd == new.memory.fd
    with pytest.raises(WireError, match="released"):
        read_tensor(old, CPU)
    for loan in (0, old.loan, new.loan + 1):
        with pytest.raises(WireError, match="not open"):
            lender.release([loan])
    lender.release_all()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.int64),
    ],
)
def test_what_is_no_dense_block_of_floats_is_refused(tensor: torch.Tensor) -> None:
    lender = TensorLender()
    with pytest.raises(WireError, match=r"cannot be lent; make it .*bfloat16"):
        lender.lend(tensor)
    assert lender.num_lent == 0


def test_no_descriptor_is_left_when_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    before, lender = descriptors(), TensorLender()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(WireError, match=r"no memory to lend 12 bytes.*No space"):
        lender.lend(torch.zeros(3))
    assert (lender.num_lent, descriptors()) == (0, before)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("complex64", [1]),
        ("__class__", [1]),
        ("float32", [-1]),
        ("float32", [-5, -1]),
        ("float32", [1 << 31, 1 << 31]),
        ("float32", [1 << 62]),
        ("float32", [0, 1 << 62]),
        ("float32", [1] * 9),
        ("float32", [513]),
        ("float32", [1 << 30]),
    ],
)
def test_a_hostile_shape_is_refused_before_anything_is_made(dtype: str, shape: list[int]) -> None:
    lender = TensorLender()
    memory = lender.lend(torch.zeros(512)).memory
    with pytest.raises(WireError):
        read_tensor(TensorHandle(1, dtype, shape, memory), CPU)
    lender.release_all()


def test_memory_that_is_not_lent_is_not_read(tmp_path: Path) -> None:
    """Another file, memory that could shrink while it is read, a process that is none."""
    (tmp_path / "file").write_bytes(bytes(64))
    fds = [
        os.open(tmp_path / "file", os.O_RDWR),
        os.memfd_create("metronome-tensor-x", os.MFD_ALLOW_SEALING),
        os.pipe()[0],
    ]
    os.ftruncate(fds[1], 64)
    for pid, fd in [(os.getpid(), fd) for fd in fds] + [(1 << 40, 3), (-1, 3), (os.getpid(), -1)]:
        handle = TensorHandle(1, "float32", [3], HostMemory(pid, fd, "metronome-tensor-x"))
        with pytest.raises(WireError, match="cannot be read"):
            read_tensor(handle, CPU)
    for fd in fds:
        os.close(fd)


def test_gpu_memory_is_read_on_a_gpu_only() -> None:
    handle = travel(TensorHandle(1, "float32", [3], CudaMemory(bytes(64), 0)))
    with pytest.raises(WireError, match="lies on a GPU, and cpu is none"):
        read_tensor(handle, CPU)


def test_mutated_handles_are_wire_errors_or_the_tensor(seed: int) -> None:
    dice, lender, before = random.Random(seed), TensorLender(), descriptors()
    frame = Encoder().encode(lender.lend(torch.zeros(9)))
    decoder: Decoder[TensorHandle] = Decoder(TensorHandle)
    for _ in range(2000):
        wrong = bytearray(frame)
        for _ in range(dice.randint(1, 3)):
            wrong[dice.randrange(len(wrong))] = dice.randrange(256)
        try:
            found = read_tensor(decoder.decode([bytes(wrong)]), CPU)
        except WireError:
            continue
        assert found.numel() * found.element_size() <= 36 and not found.any()
    lender.release_all()
    assert descriptors() == before
