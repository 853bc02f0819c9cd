"""Ranges of files are read whole, through the system's cache or without it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

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
