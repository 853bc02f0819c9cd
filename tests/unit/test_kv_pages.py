"""Pages of KV caches and states that are there before a request writes to them."""

import sys
from pathlib import Path

import pytest
import torch

from engine.worker.memory import PagePrefault, lazy_zeros

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_first_blocks_get_their_pages_and_keep_what_they_hold() -> None:
    layers = [lazy_zeros((16, MIB), torch.bfloat16) for _ in range(2)]
    layers[1][3, 5] = 7.0
    before = resident()
    pages = PagePrefault((layers, 32 * MIB))
    pages.start()
    pages.wait()
    grown = resident() - before
    assert 28 * MIB < grown < 48 * MIB, f"{grown / MIB:.0f} MiB of 64"
    assert layers[1][3, 5] == 7.0 and layers[0].count_nonzero() == 0
    pages.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tensors_of_different_sizes_get_the_same_share() -> None:
    large, small = lazy_zeros((32, MIB), torch.bfloat16), lazy_zeros((8, MIB), torch.bfloat16)
    tiny = torch.zeros(3)  # has no pages of its own
    before = resident()
    pages = PagePrefault(([small, tiny, large], 40 * MIB), ([], 8 * MIB))
    pages.start()
    pages.wait()
    grown = resident() - before
    assert 36 * MIB < grown < 56 * MIB, f"{grown / MIB:.0f} MiB of 80"
    small[:4] = large[:16] = 1.0  # half of each, which is there already
    assert resident() - before - grown < 4 * MIB


def test_stopping_waits_for_no_more_than_a_piece() -> None:
    layers = [lazy_zeros((64, MIB), torch.bfloat16)]
    pages = PagePrefault((layers, 128 * MIB))
    pages.stop()  # not started yet
    pages.start()
    pages.stop()
    assert layers[0].count_nonzero() == 0
