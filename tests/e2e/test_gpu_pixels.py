"""Pixels on a real GPU between two processes. Skipped without one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_reader import reading_process

from engine.ipc.device_pixels import DeviceSender, NoRoom
from engine.messages.media import PixelArray, Pixels
from engine.pictures.cuda_memory import UNIT, cuda_memory, find_device

pytestmark = pytest.mark.gpu

POOL = 8 << 20


def pixels(number: float, count: int = 1 << 18) -> Pixels:
    return {"pixel_values": PixelArray("<f4", [count], np.full(count, number, "<f4").tobytes())}


@pytest.mark.parametrize("in_pool", [True, False])
def test_another_process_reads_pixels_and_returns_them(in_pool):
    torch.zeros(1, device="cuda")
    memory = find_device(cuda_memory(torch.device("cuda", 0)).name)
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    sender = DeviceSender(memory, pool_bytes=POOL if in_pool else 0)
    with reading_process("cuda") as other:
        for number in range(40):
            handle = sender.lend(pixels(number), in_pool=in_pool)
            assert other("read", handle) is None
            assert set(other("give back", handle)) == {number}
        assert other("count") == [1 if in_pool else 0]
    sender.collect()
    assert sender.num_lent == 0
    sender.close()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free_before - UNIT


def test_a_process_that_dies_keeps_no_memory():
    torch.zeros(1, device="cuda")
    memory = cuda_memory(torch.device("cuda", 0))
    free_before = torch.cuda.mem_get_info()[0]
    sender = DeviceSender(memory, pool_bytes=POOL)
    with reading_process("cuda") as other:
        handles = [sender.lend(pixels(1)), sender.lend(pixels(2), in_pool=False)]
        for handle in handles:
            assert other("read", handle) is None
        with pytest.raises(NoRoom, match="has no free"):
            sender.lend(pixels(3, POOL))
    sender.close()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free_before - UNIT
