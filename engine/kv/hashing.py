"""Chained hashes of full blocks: equal hash means equal tokens from the start of the sequence."""

from __future__ import annotations

import hashlib
from array import array

ROOT = hashlib.sha256(b"metronome prefix cache").digest()


def root_hash(salt: str | None) -> bytes:
    """Parent of a sequence's first block. A salt separates whole chains: only equal salts share."""
    return ROOT if salt is None else hashlib.sha256(ROOT + salt.encode()).digest()


def extend_chain(
    chain: list[bytes], tokens: array[int], block_size: int, upto: int, root: bytes
) -> None:
    """Append the hashes of the full blocks of ``tokens[:upto]`` that ``chain`` lacks."""
    sha256 = hashlib.sha256
    parent = chain[-1] if chain else root
    data = tokens[len(chain) * block_size : upto // block_size * block_size].tobytes()
    width = block_size * tokens.itemsize
    for start in range(0, len(data), width):
        parent = sha256(parent + data[start : start + width]).digest()
        chain.append(parent)
