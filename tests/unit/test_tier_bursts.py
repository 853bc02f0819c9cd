"""A device computes prompts faster than the host keeps their blocks: what waits, and where."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import EngineArgs
from engine.ipc.host_memory import resident_bytes
from engine.kv_transfer import compute, store_thread
from engine.kv_transfer.compute import TierCopies
from engine.kv_transfer.host import HostStore
from engine.kv_transfer.opening import PlannedStores
from engine.kv_transfer.stores import Rows
from engine.messages.kv_orders import KVOrders
from engine.worker.platform.host import CpuPlatform, HostPlatform

GIB, MIB = 1 << 30, 1 << 20
SIZE = 64 << 10  # bytes of a block
NUM_BLOCKS = 100
WAIT = 30.0


class Device(HostPlatform):
    """Copies as a GPU does, with ``free`` bytes of memory of ``total``."""

    def __init__(self, free: int, total: int = 80 * GIB) -> None:
        super().__init__()
        self.free, self.total = free, total

    def free_and_total(self) -> tuple[int, int]:
        return self.free, self.total


@contextmanager
def opened(
    platform: HostPlatform, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TierCopies, torch.Tensor]]:
    """The copies of a pool, with memory of the host for them; and the pool's blocks."""
    pool = torch.randint(0, 256, (NUM_BLOCKS, SIZE), dtype=torch.uint8)
    feature: Any = SimpleNamespace(block_memory=lambda num: [pool[:, :40], pool[:, 40:]])
    machine: Any = SimpleNamespace(kv=(), platform=platform, features=(feature,))
    config = EngineArgs(kv_offloading_size=num_bytes / GIB).create_config()
    copies = TierCopies(PlannedStores(config))
    copies.attach(machine)
    try:
        copies.open(NUM_BLOCKS, "aa" * 32)
        yield copies, pool
    finally:
        copies.shutdown()


@pytest.mark.parametrize(
    ("platform", "num_stored"),
    [
        (Device(8 * GIB), 80),  # half of the host's memory for blocks
        (Device(200 * SIZE), 50),  # a quarter of the device's, which is free
        (Device(8 * GIB, 1210 * SIZE), 30),  # a quarter of what engines leave of it
        (Device(0), 4),
        (CpuPlatform(), 4),  # its steps make the copies
    ],
)
def test_a_burst_of_prompts_is_stored_when_there_is_time(
    platform: HostPlatform, num_stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_thread, "MOST_PENDING", 4 * SIZE)
    monkeypatch.setattr(compute, "BATCH_BYTES", 3 * SIZE)
    gate, write = threading.Event(), HostStore.write

    def slow_write(store: HostStore, keys: list[bytes], rows: Rows) -> list[bool]:
        gate.wait(WAIT)
        return write(store, keys, rows)

    monkeypatch.setattr(HostStore, "write", slow_write)
    with opened(platform, 160 * SIZE, monkeypatch) as (copies, pool):
        before = pool.numpy().copy()
        keys = [f"{n:032}".encode() for n in range(NUM_BLOCKS)]
        for start in range(0, NUM_BLOCKS, 20):  # steps
            places = range(start, start + 20)
            orders = KVOrders(store_keys=[keys[n] for n in places], store_blocks=[*places])
            copies.begin(SimpleNamespace(kv_transfer=orders), None)  # type: ignore[arg-type]
            pool[start : start + 20] = 0  # by the step
        gate.set()
        until = time.monotonic() + WAIT
        while copies.counts().get("host.stored", 0) < num_stored and time.monotonic() < until:
            time.sleep(0.01)
        assert copies.counts()["host.stored"] == num_stored
        assert copies.counts()["host.skipped"] == NUM_BLOCKS - num_stored
        rows = np.empty((NUM_BLOCKS, SIZE), np.uint8)
        found = copies._threads[0].store.read(keys, rows)
        assert found == [True] * num_stored + [False] * (NUM_BLOCKS - num_stored)
        assert (rows[:num_stored] == before[:num_stored]).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("platform", [Device(0), CpuPlatform()])
def test_the_hosts_pages_are_there_before_a_device_needs_them(
    platform: HostPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resident_bytes()
    with opened(platform, 64 * MIB, monkeypatch):
        for thread in threading.enumerate():
            if thread.name == "kv-pages":
                thread.join(WAIT)
        grown = resident_bytes() - before
    if platform.shares_memory:
        assert grown < 24 * MIB, f"{grown / MIB:.0f} MiB"
    else:
        assert 56 * MIB < grown < 96 * MIB, f"{grown / MIB:.0f} MiB"
