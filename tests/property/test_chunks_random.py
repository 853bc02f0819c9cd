"""Chunks of memory, taken and given back at random, next to a map of single units."""

from __future__ import annotations

import os
import random

import pytest

from engine.ipc.chunks import Chunk, Chunks

UNIT = 4


@pytest.mark.parametrize("number", range(8))
def test_chunks_never_overlap_and_merge_back_to_one(number):
    seed = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
    print(f"METRONOME_SEED={seed}")
    rng = random.Random(seed)
    num_units = rng.choice([1, 7, 64, 500])
    chunks = Chunks(num_units * UNIT + rng.randrange(UNIT), UNIT)
    owners = [0] * num_units  # by unit; 0: free
    held: dict[int, Chunk] = {}
    for name in range(1, 600):
        if held and rng.random() < 0.5:
            gone = rng.choice(list(held))
            chunk = held.pop(gone)
            chunks.give_back(chunk)
            owners = [0 if owner == gone else owner for owner in owners]
        else:
            size = rng.randint(1, max(1, rng.choice([1, num_units // 3, num_units]) * UNIT))
            wanted = -(-size // UNIT)
            fitting = [run for run in runs(owners) if run.size >= wanted]
            chunk = chunks.take(size)
            if chunk is None:
                assert not fitting
                continue
            begin, end = chunk.offset // UNIT, chunk.end // UNIT
            assert (chunk.size, set(owners[begin:end])) == (wanted * UNIT, {0})
            found = next(run for run in runs(owners) if run.offset <= begin < run.end)
            assert found.size == min(run.size for run in fitting)  # the best fit
            owners[begin:end] = [name] * wanted
            held[name] = chunk
        assert chunks.free == [Chunk(each.offset * UNIT, each.size * UNIT) for each in runs(owners)]
        assert chunks.num_taken == sum(each.size for each in held.values())
        assert sorted(chunks) == sorted(held.values())
    for chunk in rng.sample(list(held.values()), len(held)):
        chunks.give_back(chunk)
    assert chunks.free == [Chunk(0, num_units * UNIT)]


def runs(owners: list[int]) -> list[Chunk]:
    """The longest runs of free units."""
    found: list[Chunk] = []
    for unit, owner in enumerate(owners):
        if owner:
            continue
        if found and found[-1].end == unit:
            found[-1] = Chunk(found[-1].offset, found[-1].size + 1)
        else:
            found.append(Chunk(unit, 1))
    return found


def test_what_was_not_taken_cannot_be_given_back():
    chunks = Chunks(64, UNIT)
    chunk = chunks.take(10)
    assert chunk == Chunk(0, 12)
    chunks.give_back(chunk)
    for wrong in (chunk, Chunk(4, 4), Chunk(0, 64)):
        with pytest.raises(ValueError, match="is not taken"):
            chunks.give_back(wrong)
    for size in (0, -1):
        with pytest.raises(ValueError, match="a chunk of"):
            chunks.take(size)
    assert Chunks(0).take(1) is None
