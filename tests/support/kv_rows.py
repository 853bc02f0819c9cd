"""Blocks of bytes for stores of KV blocks: the content follows from the key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def key_of(number: int, group: int = 0) -> bytes:
    """A key as of the prefix cache: a digest and the number of a group."""
    return hashlib.sha256(b"%d" % number).digest() + bytes((group,))


def rows_of(numbers: Iterable[int], block_bytes: int, weights: int = 0) -> NDArray[np.uint8]:
    """The blocks [numbers, block_bytes] that a model with ``weights`` computes for these keys."""
    seeds = [(number, weights) for number in numbers]
    rows = [np.random.default_rng(seed).integers(0, 256, block_bytes, np.uint8) for seed in seeds]
    return np.array(rows, np.uint8).reshape(len(seeds), block_bytes)
