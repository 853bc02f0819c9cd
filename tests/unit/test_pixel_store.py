"""What a core does with content that comes: in the message, in shared memory, on its device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.fake_ipc import FakeDevice

from engine.ipc.device_pixels import DeviceReader, DeviceSender
from engine.ipc.pixel_segments import share
from engine.messages.media import MediaContent, PixelArray, Pixels
from engine.mm.store import PixelStore

pytestmark = pytest.mark.usefixtures("warnings_are_logged")
PIXELS: Pixels = {"x": PixelArray("<f4", [3], np.ones(3, "<f4").tobytes())}


@pytest.fixture
def device(tmp_path: Path) -> FakeDevice:
    return FakeDevice(tmp_path)


@pytest.fixture
def sender(device: FakeDevice) -> Iterator[DeviceSender]:
    made = DeviceSender(device, pool_bytes=4096)
    yield made
    made.close()
    assert not device.faults


@pytest.fixture
def store(device: FakeDevice) -> PixelStore:
    made = PixelStore()
    made.reader = DeviceReader(FakeDevice(device.directory))
    return made


def lent(sender: DeviceSender, key: str = "a") -> MediaContent:
    return MediaContent(key, PIXELS, device=sender.lend(PIXELS))


def num_lent(sender: DeviceSender) -> int:
    sender.collect()
    return sender.num_lent


def test_pixels_in_shared_memory_are_read_when_they_come(store):
    segment = share(PIXELS)
    assert not store.take(["r"], MediaContent("a", shared=segment.handle)).fault
    segment.close()
    assert store.get("a") == PIXELS
    store.drop("a")
    assert len(store) == 0


def test_a_wrong_handle_is_a_fault_of_its_content_alone(store):
    segment = share(PIXELS)
    wrong = msgspec.structs.replace(segment.handle, inode=1)
    arrival = store.take(["r"], MediaContent("a", shared=wrong))
    assert "closed before it was opened" in arrival.fault
    assert (arrival.code, len(store)) == ("invalid_media", 0)
    assert not store.take(["r"], MediaContent("a", shared=segment.handle)).fault
    assert store.get("a") == PIXELS


@pytest.mark.parametrize("in_pool", [True, False])
def test_memory_of_a_client_that_has_left_is_not_read(store, sender, in_pool, caplog):
    """Its requests were dropped, and another client's request has the same picture."""
    for key in "ab":
        handle = sender.lend(PIXELS, in_pool=in_pool)
        store.take(["r"], MediaContent(key, PIXELS, device=handle))
    assert store.on_device("a") is not None
    sender.close()
    assert store.on_device("a") is None, "opened before"
    assert store.on_device("b") is None
    assert store.get("a") == store.get("b") == PIXELS
    assert "has ended" in caplog.text


def test_what_was_encoded_is_given_back_and_its_pixels_stay(store, sender):
    """The output may be evicted, and the picture encoded again."""
    store.take(["r"], lent(sender))
    assert (tensors := store.on_device("a")) is not None
    assert tensors["x"].tolist() == [1, 1, 1]
    store.has_read("a")
    assert num_lent(sender) == 1
    store.encoded("a")
    assert num_lent(sender) == 0
    assert store.on_device("a") is None
    assert store.get("a") == PIXELS
    assert store.counters == {"read_on_device": 1}


def test_copies_that_nobody_will_read_are_given_back(store, sender):
    """The content is dropped, has come before, or has an error."""
    store.take(["r"], lent(sender))
    store.take(["s"], lent(sender))
    assert num_lent(sender) == 1
    store.take(["s"], msgspec.structs.replace(lent(sender, "b"), error="bad"))
    assert num_lent(sender) == 1
    wrong = msgspec.structs.replace(share(PIXELS).handle, inode=1)
    store.take(["s"], msgspec.structs.replace(lent(sender, "c"), pixels=None, shared=wrong))
    assert num_lent(sender) == 1
    store.drop("a")
    assert num_lent(sender) == 0


def test_what_cannot_be_opened_on_the_device_is_read_from_the_host(store, sender, caplog):
    for key in "ab":
        content = lent(sender, key)
        assert content.device is not None
        handle = msgspec.structs.replace(content.device, memory=b"nothing")
        store.take(["r"], msgspec.structs.replace(content, device=handle))
        assert store.on_device(key) is None
        store.has_read(key)
        assert store.get(key) == PIXELS
    assert (num_lent(sender), store.counters) == (0, {"unread_on_device": 2})
    assert len(caplog.records) == 1
