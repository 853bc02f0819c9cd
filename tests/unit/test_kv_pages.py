"""Pages of the KV pool that are there before a request writes to them."""

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
    pages = PagePrefault(layers, num_bytes=32 * MIB)
    pages.start()
    pages.wait()
    grown = resident() - before
    assert 28 * MIB < grown < 48 * MIB, f"{grown / MIB:.0f} MiB of 64"
    assert layers[1][3, 5] == 7.0 and layers[0].count_nonzero() == 0
    pages.stop()


def test_stopping_waits_for_no_more_than_a_piece() -> None:
    layers = [lazy_zeros((64, MIB), torch.bfloat16)]
    pages = PagePrefault(layers, num_bytes=128 * MIB)
    pages.stop()  # not started yet
    pages.start()
    pages.stop()
    assert layers[0].count_nonzero() == 0
