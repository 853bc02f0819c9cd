"""Which way pixels take to a core's device, what is counted, and what is logged once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_ipc import FakeDevice
from support.spawned import fake_config

from engine.config.media import MediaConfig
from engine.ipc.device_pixels import DeviceReader
from engine.ipc.pixel_segments import share
from engine.messages.media import DevicePixels, MediaContent, PixelArray, Pixels
from engine.rpc.launch import without_transport
from engine.rpc.pixel_route import PixelRoute

pytestmark = pytest.mark.usefixtures("warnings_are_logged")
MIB = 1 << 20


@pytest.fixture
def device(tmp_path: Path) -> FakeDevice:
    return FakeDevice(tmp_path, num_bytes=3 * MIB)


def pixels(num_bytes: int = 1000) -> Pixels:
    return {"pixel_values": PixelArray("|u1", [num_bytes], bytes(num_bytes))}


def route(device: FakeDevice, transport: str, name: str = "fake-0") -> PixelRoute:
    options = MediaConfig(mm_tensor_transport=transport, mm_tensor_pool_mib=1)

    def find(name: str) -> FakeDevice:
        if name != device.name:
            raise OSError(f"this process does not see the GPU {name}")
        return device

    return PixelRoute(options, name, find)


def put(way: PixelRoute, key: str, content: Pixels) -> DevicePixels | None:
    segment = share(content)
    try:
        return way.prepared(MediaContent(key, content, segment.handle)).device
    finally:
        segment.close()


def test_the_pool_is_used_then_allocations_then_nothing(device, caplog):
    """A step down is logged once and always counted."""
    way = route(device, "cuda_ipc_pool")
    handles = [put(way, str(number), pixels(MIB // 2)) for number in range(2)]
    assert [handle.stays for handle in handles if handle] == [True, True]
    assert way.counters == {"pixels.pooled": 2}
    assert not caplog.records
    handles += [put(way, str(number), pixels(MIB)) for number in (2, 3)]
    assert [handle.stays for handle in handles[2:] if handle] == [False, False]
    assert [put(way, str(number), pixels(MIB)) for number in (4, 5)] == [None, None]
    counts = {"pooled": 2, "pool_full": 4, "copied": 2, "memory": 2}
    assert way.counters == {f"pixels.{name}": num for name, num in counts.items()}
    full, memory = (record.getMessage() for record in caplog.records)
    assert "are sent by cuda_ipc, not by cuda_ipc_pool" in full
    assert "raise mm_tensor_pool_mib" in full
    assert "are sent by default, not by cuda_ipc_pool" in memory
    way.close()
    way.close()
    assert not device.blocks


def test_what_the_core_has_not_returned_is_not_put_there_again(device):
    way, reader = route(device, "cuda_ipc_pool"), DeviceReader(device)
    first = put(way, "a", pixels())
    assert first is not None
    assert put(way, "a", pixels()) is None
    assert put(way, "b", pixels()) is not None
    reader.give_back(first)
    assert put(way, "a", pixels()) is not None
    assert way.counters == {"pixels.pooled": 3}


def test_cuda_ipc_frees_what_the_core_has_returned(device):
    way, reader = route(device, "cuda_ipc"), DeviceReader(device)
    for number in range(10):
        handle = put(way, str(number), pixels(MIB))
        assert handle is not None
        reader.give_back(handle)
    way.collect()
    assert not device.blocks
    assert way.counters == {"pixels.copied": 10}


@pytest.mark.parametrize(
    ("name", "num_bytes", "cause", "reason"),
    [
        ("", 3 * MIB, "no_device", "the core has no GPU"),
        ("GPU-2", 3 * MIB, "no_device", "does not see the GPU GPU-2"),
        ("fake-0", 1000, "no_pool", "a pool of 1 MiB"),
    ],
)
def test_without_device_or_pool_pictures_go_by_default(
    name, num_bytes, cause, reason, device, caplog
):
    device.num_bytes = num_bytes
    way = route(device, "cuda_ipc_pool", name)
    assert not caplog.records
    assert [put(way, str(number), pixels()) for number in range(3)] == [None] * 3
    assert way.counters == {f"pixels.{cause}": 3}
    (record,) = caplog.records
    assert reason in record.getMessage()
    way.collect()
    way.close()


def test_the_default_needs_no_device(device, caplog):
    way = route(device, "default", "")
    assert put(way, "a", pixels()) is None
    assert (way.counters, caplog.records) == ({}, [])


def test_errors_are_sent_as_they_are(device):
    content = MediaContent("a", error="bad")
    assert route(device, "cuda_ipc").prepared(content) == content


def test_what_is_too_large_for_a_message_is_not_put_on_the_device(device):
    way = route(device, "cuda_ipc")
    assert way.prepared(MediaContent("a", pixels(40 << 20))).device is None
    assert way.prepared(MediaContent("b", pixels())).device is not None
    assert way.counters == {"pixels.in_messages": 2, "pixels.copied": 1}
    assert put(way, "c", pixels(40 << 20)) is None
    assert way.counters["pixels.memory"] == 1


def test_a_core_in_this_process_gets_no_transport_and_says_so(caplog):
    options = MediaConfig(mm_tensor_transport="cuda_ipc_pool")
    config = replace(fake_config(), media=options)
    assert without_transport(config).media.mm_tensor_transport == "default"
    (record,) = caplog.records
    assert "mm_tensor_transport=cuda_ipc_pool has no effect" in record.getMessage()
    caplog.clear()
    assert without_transport(fake_config()) == fake_config()
    assert not caplog.records
