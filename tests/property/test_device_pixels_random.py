"""Random loans of a device's memory, which the device reads late: nothing is overwritten before."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_ipc import FakeDevice, FakeMark

from engine.ipc.chunks import Chunk
from engine.ipc.device_pixels import DeviceReader, DeviceSender, NoRoom
from engine.messages.media import DevicePixels, PixelArray, Pixels

POOL = 1 << 14


class Loans:
    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.rng = rng
        self.device, self.other = FakeDevice(directory, num_bytes=2 * POOL), FakeDevice(directory)
        self.sender = DeviceSender(self.device, pool_bytes=POOL, num_slots=rng.choice([3, 50]))
        self.reader = DeviceReader(self.other)
        self.sent: dict[int, tuple[DevicePixels, int]] = {}  # by ticket, with their value
        self.num_full = self.num_checked = 0

    def lend(self, value: int) -> None:
        size = self.rng.choice([1, 100, 2000])
        data = np.full(size, value, "<i4").tobytes()
        pixels: Pixels = {"x": PixelArray("<i4", [size], data), "y": PixelArray("<i8", [0], b"")}
        try:
            handle = self.sender.lend(pixels, in_pool=self.rng.random() < 0.7)
        except NoRoom:
            self.num_full += 1
        else:
            self.sent[handle.ticket] = (handle, value)

    def read(self) -> None:
        """The device will read it at some time, which the host does not know."""
        handle, value = self.rng.choice(list(self.sent.values()))
        tensors: dict[str, Any] = dict(self.reader.open(handle))

        def look() -> None:
            assert set(tensors.pop("x").tolist()) == {value}
            tensors.clear()
            self.num_checked += 1

        self.other.later(look)
        self.reader.has_read(handle)

    def give_back(self) -> None:
        ticket = self.rng.choice(list(self.sent))
        handle, _ = self.sent.pop(ticket)
        self.reader.give_back(handle)

    def go_on(self) -> None:
        """The device does some of its work."""
        done = self.other.num_done + self.rng.randint(0, len(self.other.queue))
        FakeMark(self.other, done).synchronize()


@pytest.mark.parametrize("case", range(3))
def test_pixels_stay_until_the_device_has_read_them(case: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
    print(f"METRONOME_SEED={seed}")
    rng = random.Random(seed)
    loans = Loans(tmp_path, rng)
    for value in range(200):
        loans.lend(value)
        for act in (loans.read, loans.go_on, loans.give_back):
            if loans.sent and rng.random() < 0.6:
                act()
    while loans.sent:
        loans.give_back()
    loans.sender.collect()
    assert loans.sender.num_lent == 0 and loans.sender.free_chunks == [Chunk(0, POOL)]
    assert loans.num_full and loans.num_checked
    assert len(loans.device.blocks) == 1, "the pool"
    loans.sender.close()
    loans.reader.forget_ended()
    assert not loans.other.opened and not loans.other.faults and not loans.device.faults
    assert not list(tmp_path.iterdir())
