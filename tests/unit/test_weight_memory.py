"""Memory for weights: zero, aligned, never shared, and given back with its last tensor."""

import mmap
from pathlib import Path

import torch

from kernels.cpu.memory import zeros


def test_tensors_are_zero_and_do_not_overlap() -> None:
    shapes = [(3,), (0, 4), (1000, 33), (1 << 20, 5), (5 << 20, 4), (7, 2)]
    tensors = [zeros(shape, torch.float32) for shape in shapes]
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape and not tensor.any()
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert (tensor == number + 1).all()


def test_memory_is_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    for _ in range(5):
        tensors = [zeros((8 << 20,), torch.uint8).fill_(1) for _ in range(24)]
        assert resident() - before >= 8 * 24 << 20
        del tensors
    assert resident() - before < 150 << 20
