"""Shared memory without a name, and messages that carry bytes through it or beside it."""

import gc
import itertools
import logging
import os
import random
from pathlib import Path

import msgspec
import pytest

from engine.errors import WireError
from engine.ipc.channel import MIN_ARENA_BYTES, Channel
from engine.ipc.shm import ALIGNMENT, Arena, ArenaReader, Place, Ranges, aligned, create_memory

SIZE = 1 << 16


class Note(msgspec.Struct, array_like=True, frozen=True, tag="note"):
    text: str


class Pair:
    """Both sides of a channel in one process."""

    def __init__(self, size: int = SIZE) -> None:
        there, back = create_memory(size), create_memory(size)
        self.arena, self.other = Arena(there, "arena of the test"), Arena(back, "other arena")
        self.one = Channel[Note](Note, self.arena, ArenaReader(back))
        self.two = Channel[Note](Note, self.other, ArenaReader(there))
        os.close(there)
        os.close(back)

    def close(self) -> None:
        self.one.close()
        self.two.close()


def test_ranges_never_overlap_and_all_come_back(seed: int) -> None:
    dice = random.Random(seed)
    ranges = Ranges(SIZE)
    taken: dict[int, int] = {}
    for _ in range(20_000):
        if taken and dice.random() < 0.5:
            offset = dice.choice(list(taken))
            ranges.give(offset, taken.pop(offset))
        else:
            length = dice.randint(1, SIZE // 4)
            at = ranges.take(length)
            if at is not None:
                assert at % ALIGNMENT == 0 and at + length <= SIZE
                taken[at] = length
        ends = sorted((at, at + aligned(length)) for at, length in taken.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ranges.num_free == SIZE - sum(end - at for at, end in ends)
    for offset, length in taken.items():
        ranges.give(offset, length)
    assert ranges.take(SIZE) == 0  # merged into one again


def test_bytes_lie_in_the_arena_until_they_are_acknowledged() -> None:
    pair = Pair()
    data = os.urandom(3 * MIN_ARENA_BYTES)
    frames = pair.one.pack(Note("with bytes"), [data, b"short"])
    assert sum(map(len, frames)) < MIN_ARENA_BYTES  # the long one is not among them
    delivery = pair.two.unpack(frames)
    assert (delivery.message, delivery.payloads) == (Note("with bytes"), [data, b"short"])
    assert pair.arena.num_lent == 1
    pair.one.unpack(pair.two.pack(Note("thanks")))
    assert pair.arena.num_lent == 0
    assert pair.arena.num_free_bytes == SIZE
    pair.close()


def test_a_full_arena_falls_back_to_frames_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()
    data = bytes(range(256)) * 100  # two of them fit
    with caplog.at_level(logging.WARNING):
        sent = [pair.one.pack(Note(str(i)), [data]) for i in range(5)]
    assert [len(frames) for frames in sent] == [2, 2, 3, 3, 3]
    for i, frames in enumerate(sent):
        assert pair.two.unpack(frames) == (Note(str(i)), [data])
    assert [r.message for r in caplog.records if "arena of the test" in r.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    pair.one.unpack(pair.two.pack(Note("read all")))
    assert len(pair.one.pack(Note("fits again"), [data])) == 2
    pair.close()


def test_a_place_from_the_past_is_an_error() -> None:
    fd = create_memory(SIZE)
    arena, reader = Arena(fd, "arena"), ArenaReader(fd)
    os.close(fd)
    old = arena.put(b"x" * 100)
    assert old is not None and reader.read(old) == b"x" * 100
    arena.release([old.generation])
    new = arena.put(b"y" * 100)
    assert new is not None and new.offset == old.offset
    with pytest.raises(WireError, match="no longer"):
        reader.read(old)
    assert reader.read(new) == b"y" * 100
    for wrong in (Place(-64, 10, 1), Place(0, SIZE, 2), Place(SIZE, 8, 1), Place(1 << 60, 1, 1)):
        with pytest.raises(WireError, match="within"):
            reader.read(wrong)
    with pytest.raises(WireError, match="not lent"):
        arena.release([old.generation])
    arena.close()
    reader.close()


def test_a_reader_writes_nothing() -> None:
    fd = create_memory(SIZE)
    reader = ArenaReader(fd)
    os.close(fd)
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split()[1] for line in lines if "metronome-arena" in line]
    assert maps and all(rights == "r--s" for rights in maps[-1:])
    reader.close()


def test_nobody_can_shrink_the_memory_of_others() -> None:
    fd = create_memory(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_memory_has_no_name_and_goes_with_its_last_user() -> None:
    def shared_kib() -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))

    before = sorted(Path("/dev/shm").iterdir())
    size = 64 << 20
    fd = create_memory(size)
    arena = Arena(fd, "arena")
    os.close(fd)
    arena.put(bytes(size - ALIGNMENT))
    held = shared_kib()
    assert sorted(Path("/dev/shm").iterdir()) == before
    arena.close()
    del arena
    gc.collect()
    assert held - shared_kib() > size // 1024 // 2


def test_mutated_messages_are_wire_errors_only(seed: int) -> None:
    dice, num_refused = random.Random(seed), 0
    pair = Pair()
    for _ in range(5_000):
        frames = [bytearray(frame) for frame in pair.one.pack(Note("a text"), [b"z" * 5000, b"s"])]
        for _ in range(dice.randint(1, 4)):
            frame = dice.choice(frames)
            if frame:
                frame[dice.randrange(len(frame))] = dice.randrange(256)
        if dice.random() < 0.3:
            frames = frames[: dice.randrange(len(frames) + 1)]
        try:
            pair.two.unpack([bytes(frame) for frame in frames])
        except WireError:
            num_refused += 1
        try:
            pair.one.unpack(pair.two.pack(Note("back")))
        except WireError:
            pair.close()
            pair = Pair()
        if pair.arena.num_free_bytes < SIZE // 4:
            pair.close()
            pair = Pair()
    pair.close()
    assert 0 < num_refused < 5_000
