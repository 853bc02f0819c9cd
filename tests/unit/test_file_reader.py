"""Ranges of files are read whole, through the system's cache or without it."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.processes import open_files

from engine.errors import ModelError
from engine.models.checkpoint import Checkpoint
from engine.models.file_reader import PIECE_BYTES, FileReader

NUM_BYTES = 3 * PIECE_BYTES + 12_345
RANGES = (
    (0, NUM_BYTES),
    (1, PIECE_BYTES),
    (4095, 2 * PIECE_BYTES + 1),
    (PIECE_BYTES, PIECE_BYTES + 4096),
    (NUM_BYTES - 100, 100),
    (NUM_BYTES - PIECE_BYTES, PIECE_BYTES),
    (77, 0),
)
LARGE = {"small": 1 << 62, "large": 0}


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(3).bytes(NUM_BYTES)


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "weights"
    file.write_bytes(content)
    return file


def forget(file: Path) -> None:
    """Let the system drop a file from its cache."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("large_bytes", LARGE.values(), ids=LARGE)
def test_ranges_have_the_bytes_of_the_file(file, content, large_bytes, is_cached) -> None:
    reader = FileReader([file], large_bytes=large_bytes)
    for offset, size in RANGES:
        if not is_cached:
            forget(file)
        out = np.zeros(size, np.uint8)
        reader.fill(file, offset, out)
        assert out.tobytes() == content[offset : offset + size]
    reader.close()


@pytest.mark.parametrize("large_bytes", LARGE.values(), ids=LARGE)
def test_a_range_after_the_end_is_an_error(file, large_bytes) -> None:
    forget(file)
    reader = FileReader([file], large_bytes=large_bytes)
    for size in (10, PIECE_BYTES, 2 * PIECE_BYTES):
        with pytest.raises(EOFError):
            reader.fill(file, NUM_BYTES - size + 1, np.zeros(size, np.uint8))
    reader.close()


class System:
    """A system that supports direct reads, with nothing in its cache; ``without`` names what it
    refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, without: str = "") -> None:
        self.without = without
        self.num_direct = 0  # bytes that were read directly
        self._direct: set[int] = set()
        self._open, self._preadv = os.open, os.preadv
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mincore=self.mincore))

    def open(self, path: Path, flags: int) -> int:
        is_direct = bool(flags & os.O_DIRECT)
        if is_direct and self.without == "direct opening":
            raise OSError(errno.EINVAL, "")
        number = self._open(path, flags & ~os.O_DIRECT)
        if is_direct:
            self._direct.add(number)
        return number

    def mincore(self, *place: object) -> int:
        return -1 if self.without == "reports of its cache" else 0

    def preadv(self, number: int, buffers: list, offset: int) -> int:
        if number not in self._direct:
            return self._preadv(number, buffers, offset)
        place = np.frombuffer(buffers[0], np.uint8)
        assert not any(each % 4096 for each in (place.ctypes.data, len(place), offset))
        if self.without == "direct reading":
            raise OSError(errno.EIO, "")
        count = self._preadv(number, buffers, offset)
        self.num_direct += count
        return count


@pytest.mark.parametrize(
    "without", ["", "direct opening", "reports of its cache", "direct reading"]
)
def test_what_a_system_does_not_support_is_read_through_its_cache(
    file, content, monkeypatch, without
) -> None:
    system = System(monkeypatch, without)
    reader = FileReader([file], large_bytes=0)
    for offset, size in RANGES:
        out, before = np.zeros(size, np.uint8), system.num_direct
        reader.fill(file, offset, out)
        assert out.tobytes() == content[offset : offset + size]
        is_direct = not without and size >= PIECE_BYTES
        assert system.num_direct - before >= size if is_direct else system.num_direct == before
    reader.close()


def opened_by(work: Callable[[], object]) -> tuple[int, int]:
    """How many more descriptors and threads there are after a call."""
    before = open_files(), threading.active_count()
    work()
    after = open_files(), threading.active_count()
    return after[0] - before[0], after[1] - before[1]


def test_files_and_threads_end_with_a_reader(file: Path, monkeypatch) -> None:
    System(monkeypatch)
    readers = []

    def read_and_close() -> None:
        reader = FileReader([file], large_bytes=0)
        readers.append(reader)
        reader.fill(file, 0, np.zeros(2 * PIECE_BYTES, np.uint8))
        with pytest.raises(EOFError):
            reader.fill(file, NUM_BYTES, np.zeros(PIECE_BYTES, np.uint8))
        reader.close()

    def fail() -> None:
        with pytest.raises(FileNotFoundError):
            FileReader([file, file.parent / "missing"], large_bytes=0)

    assert opened_by(read_and_close) == (0, 0)
    assert opened_by(fail) == (0, 0)


def test_empty_files_and_missing_ones(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    reader = FileReader([empty], large_bytes=0)
    with pytest.raises(EOFError):
        reader.fill(empty, 0, np.zeros(PIECE_BYTES, np.uint8))
    reader.close()
    with pytest.raises(FileNotFoundError):
        FileReader([empty, tmp_path / "missing"])


def test_a_file_that_is_cut_after_its_header_was_read_is_damaged(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, PIECE_BYTES)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", 3 * PIECE_BYTES)
        with pytest.raises(ModelError, match="damaged or truncated: it ended while it was read"):
            checkpoint.tensor("a")
