"""Blocks of the KV pool on a made-up device that checks order and memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import triton_interpreter
from support.fake_cuda import FakeCuda

from engine.kv_transfer.pool_blocks import PoolBlocks
from engine.worker.platform.cuda import CudaPlatform

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="takes the place of a device"
)


def test_copies_have_the_content_of_when_they_were_made_and_loads_wait_for_their_blocks() -> None:
    with FakeCuda() as cuda:
        platform = CudaPlatform()
        pieces = [platform.zeros((8, size), torch.uint8) for size in (16, 48)]
        for piece in pieces:
            piece.copy_(platform.upload(np.arange(piece.numel(), dtype=np.uint8)).view(8, -1))
        wanted = np.concatenate([piece.cpu().numpy()[[3, 1]] for piece in pieces], axis=1)
        blocks = PoolBlocks(pieces, platform)
        home = blocks.read([3, 1])
        for piece in pieces:
            piece.add_(1)  # by later steps
        assert np.array_equal(home(), wanted)
        rows = blocks.rows(2)
        rows[:] = 7
        blocks.write([2, 5], rows, platform.mark())
        assert all(piece[[2, 5]].cpu().unique().tolist() == [7] for piece in pieces)
        assert [piece[3, 0].item() for piece in pieces] == [49, 145]
        assert not cuda.faults


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_that_does_not_wait_for_steps_is_found(waits: bool) -> None:
    with FakeCuda() as cuda:
        platform = CudaPlatform()
        piece = platform.zeros((4, 16), torch.uint8)
        early = platform.mark()
        piece.sum()  # a step that uses the block
        blocks = PoolBlocks([piece], platform)
        blocks.write([2], blocks.rows(1), platform.mark() if waits else early)
    assert (not cuda.faults) == waits
