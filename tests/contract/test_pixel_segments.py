"""Pixels in shared memory between two processes, and handles that are wrong."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from support.processes import collect_garbage, open_files

from engine.errors import WireError
from engine.ipc import pixel_segments
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.ipc.pixel_segments import Segment, adopt, read, share
from engine.messages.media import MediaContent, PixelArray, Pixels, SharedArray, SharedPixels

SENDER = """
import sys
import msgspec, numpy as np
from engine.ipc.pixel_segments import share
from engine.messages.media import MediaContent, PixelArray

values = np.arange(24, dtype="<f4").reshape(2, 3, 4)
pixels = {
    "pixel_values": PixelArray(values.dtype.str, list(values.shape), values.tobytes()),
    "image_grid_thw": PixelArray("<i8", [3], np.array([1, 2, 3], "<i8").tobytes()),
}
segment = share(pixels)
frame = msgspec.msgpack.encode(MediaContent("a", shared=segment.handle))
sys.stdout.buffer.write(len(frame).to_bytes(4, "little") + frame)
sys.stdout.buffer.flush()
sys.stdin.read()
"""


def array(values: np.ndarray) -> PixelArray:
    return PixelArray(values.dtype.str, list(values.shape), values.tobytes())


def values_of(pixels: Pixels) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(one.data, one.dtype).reshape(one.shape) for name, one in pixels.items()
    }


def mapped_bytes() -> int:
    collect_garbage()
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines if pixel_segments.NAME in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


@contextmanager
def sender() -> Iterator[tuple[subprocess.Popen[bytes], MediaContent]]:
    """Another process that shares pixels until its input ends, and its message."""
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        size = int.from_bytes(process.stdout.read(4), "little")
        yield process, msgspec.msgpack.decode(process.stdout.read(size), type=MediaContent)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = share({"x": array(np.arange(20, dtype="<i2")), "y": array(np.ones((2, 2), "<f4"))})
    yield made
    made.close()


def test_another_process_reads_the_pixels_and_keeps_them_when_the_sender_dies():
    before = open_files(), mapped_bytes()
    with sender() as (process, content):
        assert content.shared is not None
        got = read(content.shared)
        process.kill()
        process.wait()
        found = values_of(got)
        assert found["pixel_values"].tolist() == np.arange(24).reshape(2, 3, 4).tolist()
        assert found["image_grid_thw"].tolist() == [1, 2, 3]
        with pytest.raises(WireError, match="cannot be opened: No such file"):
            read(content.shared)
    del got, found
    assert (open_files(), mapped_bytes()) == before


def test_an_adopted_segment_outlives_its_first_process_and_is_sent_on():
    with sender() as (process, content):
        assert content.shared is not None
        held = adopt(content.shared)
        process.kill()
        process.wait()
    assert held.handle.pid == os.getpid()
    assert values_of(read(held.handle))["image_grid_thw"].tolist() == [1, 2, 3]
    held.close()
    assert not held.is_open


def test_arrays_are_views_of_memory_that_nobody_can_change(segment):
    before = mapped_bytes()
    got = read(segment.handle)
    assert mapped_bytes() > before
    data = got["x"].data
    assert isinstance(data, memoryview)
    with pytest.raises(TypeError, match="read-only"):
        data[0] = 1
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(segment.handle.fd, b"1", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.handle.fd, 1)


def test_nothing_is_left_of_segments():
    before = open_files(), mapped_bytes()
    for number in range(200):
        made = share({"x": array(np.full(1000, number))})
        got = read(made.handle)
        made.close()
        made.close()
        assert np.frombuffer(got["x"].data, "<i8").tolist() == [number] * 1000
        share({"x": array(np.ones(5))})  # forgotten without being closed
    del made, got
    assert (open_files(), mapped_bytes()) == before


@pytest.mark.parametrize("values", [np.zeros((0, 3), "<f4"), np.float32(2).reshape(())])
def test_empty_arrays_and_numbers_are_shared_too(values):
    made = share({"x": array(values), "y": array(np.ones(3))})
    assert values_of(read(made.handle))["x"].tolist() == values.tolist()
    made.close()
    assert read(share({}).handle) == {}


def test_pixels_are_sent_as_bytes_or_views_and_received_as_views():
    encode, decoder = MessageEncoder().encode, MessageDecoder[MediaContent](MediaContent)
    for data in (b"1234", memoryview(b"1234")):
        sent = MediaContent("a", {"x": PixelArray("<f4", [1], data)})
        assert decoder.decode([encode(sent)]) == sent


# -- handles that are wrong


def changed(segment: Segment, **fields: object) -> SharedPixels:
    return msgspec.structs.replace(segment.handle, **fields)


def one(dtype: str = "<f4", shape: tuple[int, ...] = (2, 2), offset: int = 64):
    return {"y": SharedArray(dtype, list(shape), offset)}


WRONG_ARRAYS = {
    "past the end": (one(offset=128), "end within 128 bytes"),
    "too large": (one(shape=(2, 9)), "of 72 bytes at 64"),
    "negative": (one(offset=-64), "from 0 on"),
    "crooked": (one(offset=4), "multiple of 64"),
    "overlapping": ({**one(offset=0), "x": SharedArray("<i2", [20], 0)}, "from 16 on"),
    "overflow": (one(shape=(2**62, 2**62)), "end within 128 bytes"),
    "overflowing offset": (one(offset=2**64 - 64), "end within 128 bytes"),
    "negative shape": (one(shape=(-2, -2)), "none of them negative"),
    "zero by much": (one(shape=(0,) * 9), "at most 8 dimensions"),
    "object": (one(dtype="|O"), "dtype '|O'"),
    "other order": (one(dtype=">f4"), "dtype '>f4'"),
    "text": (one(dtype="<U9999999"), "dtype '<U9999999'"),
    "many": ({str(n): SharedArray("<f4", [0], 0) for n in range(65)}, "65 arrays"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_arrays_outside_of_the_segment_are_refused(name, segment):
    arrays, reason = WRONG_ARRAYS[name]
    before = open_files()
    with pytest.raises(WireError) as found:
        read(changed(segment, arrays=arrays))
    assert reason in str(found.value)
    assert open_files() == before


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"namespace": ""}, "cannot be opened in"),
        ({"namespace": "another machine"}, "cannot be opened in"),
        ({"pid": -1}, "of process -1"),
        ({"pid": 0}, "of process 0"),
        ({"pid": 2**40}, "cannot be opened"),
        ({"fd": -1}, "file -1"),
        ({"fd": 2**40}, "cannot be opened"),
        ({"size": 0}, "must be 1 to"),
        ({"size": 2**40}, "must be 1 to"),
        ({"size": 64}, "within 64 bytes"),
        ({"size": 192}, "of 128 bytes, must be number"),
        ({"inode": 1}, "closed before it was opened"),
    ],
)
def test_wrong_numbers_are_refused(fields, reason, segment):
    before = open_files()
    for use in (read, adopt):
        with pytest.raises(WireError, match=reason):
            use(changed(segment, **fields))
    assert open_files() == before


def test_numbers_that_now_are_of_other_pixels_are_refused(segment):
    """A file's number is given again as soon as it is closed."""
    segment.close()
    later = share({"x": array(np.zeros(20, dtype="<i2")), "y": array(np.zeros((2, 2), "<f4"))})
    assert later.handle.fd == segment.handle.fd
    with pytest.raises(WireError, match="closed before it was opened"):
        read(segment.handle)
    later.close()


def test_other_files_are_not_even_opened(segment, tmp_path):
    """Opening a pipe would wait for a writer, opening a device could do anything."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    loose = os.memfd_create(pixel_segments.NAME)
    try:
        for fd in (pipe, plain):
            with pytest.raises(WireError, match="is not shared memory named metronome-pixels"):
                read(changed(segment, fd=fd, inode=os.fstat(fd).st_ino))
        os.ftruncate(loose, 128)
        with pytest.raises(WireError, match="is not sealed"):
            read(changed(segment, fd=loose, inode=os.fstat(loose).st_ino))
    finally:
        for fd in (pipe, plain, loose):
            os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_memory_of_another_user_is_refused(segment):
    other = share({"x": array(np.ones(3))})
    os.fchown(other.handle.fd, 65534, -1)
    with pytest.raises(WireError, match="not shared memory of this user"):
        read(other.handle)
    other.close()


HIDDEN = """
import ctypes, os
from engine.ipc.pixel_segments import adopt, share
from engine.ipc.sealed_files import namespace
from engine.messages.media import MediaContent, PixelArray, SharedPixels
from engine.messages.wire import Bring, FromClient
from engine.ipc.codec import MessageDecoder
from engine.rpc.client_protocol import ClientProtocol

assert namespace()
if os.geteuid() == 0:
    os.setuid(65534)
can_be_read = ctypes.CDLL(None).prctl
can_be_read(4, 1, 0, 0, 0)
pixels = {"x": PixelArray("|u1", [4], b"abcd")}
segment = share(pixels)
can_be_read(4, 0, 0, 0, 0)
try:
    share(pixels)
except OSError as error:
    print(repr(namespace()), error)
held = adopt(segment.handle)
frame = ClientProtocol().bring(["r"], MediaContent("a", pixels, held.handle))
sent = MessageDecoder[FromClient](FromClient).decode([frame]).content
print(sent.shared, bytes(sent.pixels["x"].data))
"""


def test_a_process_that_is_hidden_from_others_sends_pixels_in_messages():
    """After a change of its user, or with capabilities of its file, for instance."""
    run = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True)
    assert run.stdout.splitlines() == [
        "'' no anonymous shared memory: this system has none, or hides this process's",
        "None b'abcd'",
    ], run.stderr


@pytest.mark.parametrize(
    "wrong", [PixelArray("<f4", [2], b"1234"), PixelArray("|O", [1], b"12345678")]
)
def test_pixels_whose_bytes_do_not_fit_are_not_shared(wrong):
    with pytest.raises(WireError, match="array 'x'"):
        share({"x": wrong})


def test_half_of_the_files_of_a_process_stay_free():
    """Then no more is shared, and what comes is copied, not mapped."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pixels = {"x": array(np.arange(5))}
    made: list[Segment] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * open_files() + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="half of this process's limit"):
            while True:
                made.append(share(pixels))
        before = open_files()
        with pytest.raises(OSError, match="half of this process's limit"):
            adopt(made[0].handle)
        kept = read(made[0].handle)
        assert open_files() == before
        assert values_of(kept)["x"].tolist() == [0, 1, 2, 3, 4]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in made:
            each.close()
    assert made
