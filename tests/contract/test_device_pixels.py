"""Pixels on a device between two processes, on a made-up device whose copies are late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.device_reader import ReadingProcess, reading_process
from support.fake_ipc import FakeDevice
from support.processes import open_files

from engine.errors import WireError
from engine.ipc.chunks import Chunk
from engine.ipc.device_pixels import DeviceReader, DeviceSender, NoRoom
from engine.ipc.returns import Loan, Returns, ReturnsOfOwner
from engine.messages.media import DevicePixels, PixelArray, Pixels, SharedArray

POOL = 4096


@pytest.fixture
def device(tmp_path: Path) -> FakeDevice:
    return FakeDevice(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[ReadingProcess]:
    with reading_process(tmp_path) as process:
        yield process


def pixels(number: float, count: int = 128) -> Pixels:
    return {"pixel_values": PixelArray("<f4", [count], np.full(count, number, "<f4").tobytes())}


def test_chunks_of_one_pool_are_read_and_used_again(device, other):
    """The pool is really used: one allocation, opened once, whatever is sent."""
    sender = DeviceSender(device, pool_bytes=POOL)
    for number in range(30):
        handles = [sender.lend(pixels(number + part)) for part in (0, 0.25, 0.5)]
        assert all(handle.stays for handle in handles)
        assert len({handle.arrays["pixel_values"].offset for handle in handles}) == 3
        for handle in handles:
            assert other("read", handle) is None
        for part, handle in zip((0, 0.25, 0.5), handles, strict=True):
            assert other("give back", handle) == [number + part] * 128
    assert (device.num_allocated, device.num_written) == (1, 90)
    assert other("count") == [1, 1, []]
    sender.collect()
    assert (sender.num_lent, sender.free_chunks) == (0, [Chunk(0, POOL)])
    sender.close()
    sender.close()
    assert not device.blocks


def test_a_chunk_is_not_used_again_before_the_device_has_read_it(device, other):
    """The reader has opened it and queued its work, which the device does late."""
    sender = DeviceSender(device, pool_bytes=512)
    first = sender.lend(pixels(1))
    assert other("read", first) is None
    with pytest.raises(NoRoom, match="no free 512") as found:
        sender.lend(pixels(2))
    assert found.value.cause == "pool_full"
    assert other("give back", first) == [1] * 128
    second = sender.lend(pixels(2))
    assert second.arrays == first.arrays
    other("read", second)
    assert other("give back", second) == [2] * 128


def test_a_handle_is_sent_when_the_device_has_the_pixels(device):
    sender = DeviceSender(device, pool_bytes=POOL)
    for in_pool in (True, False):
        handle = sender.lend(pixels(3), in_pool=in_pool)
        assert not device.queue
        assert DeviceReader(device).open(handle)["pixel_values"].tolist() == [3] * 128


def test_own_allocations_are_closed_by_the_reader_and_freed_by_the_sender(device, other):
    sender = DeviceSender(device)
    handles = [sender.lend(pixels(number), in_pool=False) for number in range(5)]
    assert not any(handle.stays for handle in handles)
    for handle in handles:
        other("read", handle)
    assert other("count") == [5, 5, []]
    for number, handle in enumerate(handles):
        assert other("give back", handle) == [number] * 128
    assert other("count") == [0, 0, []]
    sender.collect()
    assert not device.blocks


def test_what_is_never_read_is_given_back_too(device, other):
    """Its request was aborted, so nothing was opened."""
    sender = DeviceSender(device, pool_bytes=512)
    for number in range(3):
        assert other("give back", sender.lend(pixels(number))) is None
    sender.collect()
    assert sender.free_chunks == [Chunk(0, 512)]


def test_the_death_of_the_reader_ends_its_loans(device, other):
    sender = DeviceSender(device, pool_bytes=POOL)
    handles = [sender.lend(pixels(1)), sender.lend(pixels(2), in_pool=False)]
    for handle in handles:
        other("read", handle)
    other("die")
    other.process.wait()
    before = open_files()
    sender.close()
    assert not device.blocks
    assert open_files() < before
    with pytest.raises(NoRoom, match="closed"):
        sender.lend(pixels(3))


def test_the_end_of_the_sender_is_noticed_by_the_reader(device, other):
    senders = [DeviceSender(device, pool_bytes=POOL), DeviceSender(device)]
    handles = [senders[0].lend(pixels(1)), senders[1].lend(pixels(2), in_pool=False)]
    for handle in handles:
        other("read", handle)
    other("forget")
    assert other("count") == [2, 2, []]
    for sender in senders:
        sender.close()
    other("forget")
    assert other("count") == [0, 0, []]
    for handle in handles:
        other("give back", handle)
    assert "cannot be opened" in other("read", handles[0])


@pytest.mark.parametrize(
    ("options", "in_pool", "num_lent", "cause"),
    [
        ({"pool_bytes": 512}, True, 1, "pool_full"),
        ({"pool_bytes": 0}, True, 0, "pool_full"),
        ({"num_slots": 1}, False, 1, "slots"),
        ({}, False, 2, "memory"),
    ],
)
def test_a_picture_without_room_says_why(options, in_pool, num_lent, cause, device):
    device.num_bytes = 1024
    sender = DeviceSender(device, **options)
    for _ in range(num_lent):
        sender.lend(pixels(1), in_pool=in_pool)
    with pytest.raises(NoRoom) as found:
        sender.lend(pixels(1), in_pool=in_pool)
    assert (found.value.cause, sender.num_lent) == (cause, num_lent)


@pytest.mark.parametrize("error", [OSError, MemoryError, RuntimeError])
def test_a_copy_that_fails_returns_its_memory(error, device, monkeypatch):
    def write(*args: object) -> None:
        raise error("lost")

    sender = DeviceSender(device, pool_bytes=512)
    monkeypatch.setattr(device, "write", write)
    for in_pool in (True, False, True):
        with pytest.raises(NoRoom, match="cannot be copied to the device: lost"):
            sender.lend(pixels(1), in_pool=in_pool)
    assert (sender.num_lent, len(device.blocks)) == (0, 1)


def test_a_pool_that_cannot_be_allocated_leaves_nothing_open(device):
    before = open_files()
    device.num_bytes = 100
    with pytest.raises(MemoryError, match="of 100 bytes"):
        DeviceSender(device, pool_bytes=512)
    assert open_files() == before


WRONG = {
    "device": ({"device": "fake-1"}, "pixels are on 'fake-1'"),
    "memory": ({"memory": b"nothing"}, "cannot be opened"),
    "size": ({"size": POOL + 1}, "a block of 4096 bytes"),
    "arrays": ({"arrays": {"x": SharedArray("<f4", [POOL], 0)}}, "end within 4096 bytes"),
    "dtype": ({"arrays": {"x": SharedArray("|O", [1], 0)}}, "dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_handles_are_refused(name, device):
    fields, reason = WRONG[name]
    sender = DeviceSender(device, pool_bytes=POOL)
    handle = msgspec.structs.replace(sender.lend(pixels(1)), **fields)
    reader = DeviceReader(device)
    with pytest.raises(WireError, match=reason):
        reader.open(handle)
    assert not device.opened
    reader.give_back(handle)
    sender.collect()
    assert sender.num_lent == 0


@pytest.mark.parametrize("fields", [{"slot": 4096}, {"slot": -1}, {"ticket": 0}, {"ticket": 1}])
def test_wrong_returns_end_no_loan(fields, device):
    sender = DeviceSender(device, pool_bytes=POOL)
    sender.lend(pixels(1))
    handle = sender.lend(pixels(1))
    DeviceReader(device).give_back(msgspec.structs.replace(handle, **fields))
    sender.collect()
    assert sender.num_lent == 2


def test_what_is_returned_late_does_not_end_a_later_loan():
    """A reader that was thought dead writes to a slot that is lent again."""
    returns = Returns(1)
    other = ReturnsOfOwner(returns.handle)
    first = returns.lend()
    assert first is not None
    assert returns.lend() is None
    returns.end(first)
    second = returns.lend()
    assert second is not None
    assert second.slot == first.slot
    other.give_back(first)
    assert not returns.is_returned(second)
    other.give_back(second)
    assert returns.is_returned(second)
    assert other.has_owner
    other.close()
    returns.close()
    assert not other.has_owner


def test_returns_that_are_another_file_are_refused(device):
    handle: DevicePixels = DeviceSender(device).lend(pixels(1), in_pool=False)
    returns = Returns(4)
    for fields in ({"size": 1 << 30}, {"size": 8}, {"inode": 1}, {"fd": 0}, {"pid": 1 << 40}):
        with pytest.raises(WireError):
            ReturnsOfOwner(msgspec.structs.replace(handle.returns, **fields))
    assert not returns.is_returned(Loan(0, 1))
    returns.close()
