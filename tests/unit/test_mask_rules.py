"""Windows and chunks are read from a model's mask rule, for any length."""

from __future__ import annotations

import pytest
import torch

from engine.models.general_support import Misfit
from engine.models.general_trial import window_of

CPU = torch.device("cpu")


def sliding(size):
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunked(size):
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 63, 64, 65, 200])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 64, 199])
def test_windows_and_chunks_are_told_apart(length, size):
    window = (size, False) if size < length else (0, False)
    assert window_of(sliding(size), length, CPU) == window
    found = window_of(chunked(size), length, CPU)
    if size >= length:
        assert found == (0, False)
    elif size > 1:  # a chunk of one token is a window of one token
        assert found in ((size, True), window_of(sliding(size), length, CPU))
    if 2 <= size < length - 1:
        assert found == (size, True)


@pytest.mark.parametrize(
    "rule",
    [
        lambda batch, head, query, key: key >= 0,  # sees later tokens
        lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2),
        lambda batch, head, query, key: (key <= query) & ((key > query - 8) | (key == 0)),
        lambda batch, head, query, key: (key <= query) | (key < 3),
    ],
    ids=["later tokens", "every second", "window and first token", "prefix"],
)
def test_other_masks_are_refused(rule):
    with pytest.raises(Misfit, match="mask"):
        window_of(rule, 64, CPU)
