"""Tensors lent by one process to another: on the CPU, and on a GPU where there is one."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from engine.errors import WireError
from engine.ipc.tensors import TensorHandle, TensorLender, read_tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def features(number: int, device: str) -> torch.Tensor:
    """A view that is not contiguous, of another size each time. [100 + number, number]"""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    return torch.full((number, 100 + number), number % 7, dtype=dtype, device=device).t()


def _encode(line: Connection, device: str) -> None:
    """In a process of its own: answers a number with features, a list with their release."""
    lender = TensorLender()
    while True:
        asked = line.recv()
        if isinstance(asked, list):
            lender.release(asked)
            line.send(lender.num_lent)
        else:
            line.send(lender.lend(features(asked, device)))


@pytest.mark.parametrize("device", DEVICES)
def test_features_of_an_encoder_arrive_and_go_with_it(device: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    encoder = context.Process(target=_encode, args=(theirs, device))
    encoder.start()

    def ask(what: int | list[int]) -> TensorHandle:
        ours.send(what)
        assert ours.poll(None)
        answer: TensorHandle = ours.recv()
        return answer

    try:
        for number in range(50):
            handle = ask(number)
            found = read_tensor(handle, torch.device(device))
            assert torch.equal(found, features(number, device))
            assert ask([handle.loan]) == 0
        handle = ask(7)
        found = read_tensor(handle, torch.device(device))
    finally:
        encoder.kill()
        encoder.join()
    assert torch.equal(found, features(7, device))  # a copy: it does not go with its lender
    with pytest.raises(WireError, match="cannot be read"):
        read_tensor(handle, torch.device(device))
