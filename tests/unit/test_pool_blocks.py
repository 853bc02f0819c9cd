"""Blocks of the pool as rows of bytes: on a CPU, and as a device copies them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.kv_transfer.pool_blocks import PoolBlocks, runs
from engine.worker.platform import Mark
from engine.worker.platform.host import CpuPlatform, HostMark, HostPlatform

NUM_BLOCKS = 40
WIDTHS = (6, 16, 2)
OF_WORDS = (48, 16, 8)  # which a device copies as words of 8 bytes


class Late:
    """A mark that a device has not reached until the host has waited for it."""

    def __init__(self, done: list[str], name: str) -> None:
        self._done = done
        self._name = name

    def synchronize(self) -> None:
        self._done.append(self._name)


class Device(HostPlatform):
    """Notes which marks were awaited, and whether copies were made aside."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[str] = []

    def mark(self) -> Any:
        return Late(self.awaited, "mark")


def make(
    platform: HostPlatform, widths: tuple[int, ...] = WIDTHS
) -> tuple[list[torch.Tensor], PoolBlocks]:
    generator = torch.Generator().manual_seed(3)
    pieces = [
        torch.randint(0, 256, (NUM_BLOCKS, width), dtype=torch.uint8, generator=generator)
        for width in widths
    ]
    return pieces, PoolBlocks(pieces, platform)


@pytest.mark.parametrize("widths", [WIDTHS, OF_WORDS])
@pytest.mark.parametrize("platform", [CpuPlatform, HostPlatform])
def test_rows_have_the_content_of_blocks_when_they_were_read(
    platform: type[HostPlatform], widths: tuple[int, ...]
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pieces, blocks = make(platform(), widths)
    assert blocks.num_bytes == sum(widths)
    for _ in range(20):
        chosen = rng.sample(range(NUM_BLOCKS), rng.randint(1, 12))
        now = torch.cat([piece[chosen] for piece in pieces], dim=1).numpy()
        waiting = blocks.read(chosen)
        for piece in pieces:  # the step overwrites them
            piece[chosen] = rng.randrange(256)
        rows = waiting()
        assert (rows == now).all() and rows.flags.c_contiguous
        begin = rng.randrange(len(chosen))
        assert (waiting(slice(begin, begin + 3)) == now[begin : begin + 3]).all()
        others = rng.sample(range(NUM_BLOCKS), len(chosen))
        before = [piece.clone() for piece in pieces]
        mine = blocks.rows(len(rows))
        mine[:] = rows
        blocks.write(others, mine, HostMark())
        assert (torch.cat([piece[others] for piece in pieces], dim=1).numpy() == now).all()
        rest = [block for block in range(NUM_BLOCKS) if block not in others]
        for old, piece in zip(before, pieces, strict=True):
            assert (old[rest] == piece[rest]).all()


def test_a_device_is_awaited_before_rows_are_used_and_before_a_load_ends() -> None:
    device = Device()
    _, blocks = make(device)
    waiting = blocks.read([3, 4])
    assert not device.awaited  # the step does not wait
    rows = waiting()
    assert device.awaited == ["mark", "mark"]  # that they are gathered, that they are here
    device.awaited.clear()
    after: Mark = Late(device.awaited, "steps before")  # type: ignore[assignment]
    blocks.write([7, 8], rows, after)
    assert device.awaited == ["steps before", "mark"]


def test_rows_may_be_used_again_after_a_write() -> None:
    pieces, blocks = make(HostPlatform())
    rows = np.full((1, blocks.num_bytes), 7, np.uint8)
    blocks.write([5], rows, HostMark())
    rows[:] = 8
    assert all((piece[5] == 7).all() for piece in pieces)


def test_consecutive_blocks_are_copied_at_once() -> None:
    assert runs([4, 5, 6, 9, 2, 3]) == [(0, 4, 3), (3, 9, 1), (4, 2, 2)]
