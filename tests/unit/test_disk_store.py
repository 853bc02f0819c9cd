"""The disk tier keeps blocks across restarts within a bound; damage costs only blocks."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.disk_blocks import (
    BLOCK_BYTES,
    IDENTITY,
    NEVER,
    PLENTY,
    bytes_in,
    get,
    has,
    key_of,
    opened,
    put,
    rows_of,
    segments_in,
)
from support.patience import WAIT_SECONDS

from engine.errors import ConfigError
from engine.kv_transfer.disk import DiskStore
from engine.kv_transfer.disk_files import StoreDirectory

TIGHT = 400_000
"""A bound for 32 segments of 7 blocks."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def filled(path: Path, numbers: range, most_bytes: int = PLENTY) -> None:
    store = opened(path, most_bytes)
    assert all(put(store, numbers))
    store.close()


def filled_file(path: Path) -> Path:
    """A file with six blocks, which are its last bytes, and room for a seventh entry."""
    filled(path, range(6), TIGHT)
    (file,) = segments_in(path)
    return file


def test_blocks_are_there_after_a_restart(path: Path) -> None:
    filled(path, range(40))
    store = opened(path)
    assert has(store, range(41)) == [True] * 40 + [False]
    assert get(store, [3, 41, 39, 4, 0, 3]) == [True, False, True, True, True, True]
    assert store.counts()["num_blocks"] == 40
    assert store.counts()["num_bytes"] == 40 * BLOCK_BYTES
    store.close()
    store.close()
    assert has(store, [1]) == get(store, [1]) == put(store, [99]) == [False]
    store.forget([key_of(1)])
    store.clear()
    assert all(get(opened(path), range(40)))


def test_a_block_is_stored_once(path: Path) -> None:
    store = opened(path)
    put(store, range(5))
    store.close()
    size = bytes_in(path)
    store = opened(path)
    assert all(put(store, [*range(5), 2]))
    store.close()
    assert bytes_in(path) == size


def test_keys_have_a_largest_length(path: Path) -> None:
    store, keys = opened(path), [b"", b"a", b"b" * 64, b"c" * 65]
    assert store.write(keys, rows_of(keys)) == [False, True, True, False]
    assert store.counts()["refused"] == 2
    store.close()
    assert opened(path).contains(keys) == [False, True, True, False]


@pytest.mark.parametrize(
    "other",
    [
        IDENTITY._replace(namespace="cd" * 32),
        IDENTITY._replace(block_bytes=BLOCK_BYTES + 1),
        IDENTITY._replace(rank=1),
        IDENTITY._replace(num_ranks=2),
    ],
)
def test_blocks_of_another_identity_are_a_miss(path: Path, other) -> None:
    filled(path, range(4))
    store = opened(path, identity=other)
    assert has(store, range(4)) == [False] * 4
    (file,) = segments_in(path)
    assert store.write([key_of(0)], np.ones((1, other.block_bytes), np.uint8)) == [True]
    store.close()
    assert all(get(opened(path), range(4)))
    (renamed,) = set(segments_in(path)) - {file}
    renamed.rename(path / (file.name[:33] + renamed.name[33:]))  # as if of the first identity
    file.unlink()
    assert not any(get(opened(path), range(4)))


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_never_served(path: Path, bit: int) -> None:
    file = filled_file(path)
    whole = file.read_bytes()
    header, entries = range(0, 4096, 455), range(4096, 4096 + 97)
    blocks = range(len(whole) - 6 * BLOCK_BYTES, len(whole), 211)
    for place in (*header, *entries, *blocks):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        file.write_bytes(damaged)
        store = opened(path)
        num_good, num_damaged = sum(get(store, range(6))), store.counts()["damaged"]
        expected = 0 if place < 4096 else 5
        assert (num_good, num_damaged) == (expected, 1), place
        assert store.counts()["num_blocks"] == expected
        store.close()
        store = opened(path)
        assert (sum(get(store, range(6))), store.counts()["damaged"]) == (expected, 0), place
        store.close()


def test_flips_outside_blocks_do_no_harm(path: Path) -> None:
    file = filled_file(path)
    whole = file.read_bytes()
    for place in (4096 + 6 * 96, 4096 + 7 * 96, 8191):  # the unused entry, a mark, filling bytes
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        store = opened(path)
        assert all(get(store, range(6)))
        store.close()


def test_a_file_cut_anywhere_loses_what_is_cut(path: Path) -> None:
    file = filled_file(path)
    whole = file.read_bytes()
    ends = [len(whole) - (5 - number) * BLOCK_BYTES for number in range(6)]
    for length in range(0, len(whole), 97):
        file.write_bytes(whole[:length])
        store = opened(path)
        assert has(store, range(6)) == get(store, range(6)) == [end <= length for end in ends]
        assert all(put(store, range(6)))
        assert all(get(store, range(6)))
        store.clear()
        store.close()


def test_what_a_dead_process_has_reserved_is_released(path: Path) -> None:
    file = filled_file(path)
    size = file.stat().st_size
    os.truncate(file, size + BLOCK_BYTES)
    assert all(get(opened(path), range(6)))
    assert file.stat().st_size == size


def test_a_file_cut_in_use_loses_what_is_cut(path: Path) -> None:
    file = filled_file(path)
    store = opened(path)
    os.truncate(file, file.stat().st_size - BLOCK_BYTES - 1)
    assert get(store, range(6)) == [True] * 4 + [False] * 2
    assert store.counts()["damaged"] == 2
    assert has(store, range(6)) == [True] * 4 + [False] * 2


def test_forgotten_blocks_stay_so(path: Path) -> None:
    store = opened(path)
    put(store, range(10))
    store.forget([key_of(2), key_of(4), key_of(11)])
    assert get(store, range(5)) == [True, True, False, True, False]
    assert put(store, [2], version=1) == [True]
    store.close()
    store = opened(path)
    assert get(store, range(5, 10)) == [True] * 5
    assert get(store, [2, 4], version=1) == [True, False]
    assert store.counts()["damaged"] == 0
    store.clear()
    assert store.counts()["num_blocks"] == 0
    put(store, [3], version=1)
    store.close()
    assert get(opened(path), range(10), version=1) == [number == 3 for number in range(10)]


def test_two_stores_see_what_the_other_writes_and_withdraws(path: Path) -> None:
    one, two = opened(path), opened(path)
    put(one, range(4))
    put(two, range(2, 6))  # not yet known to the other: copies
    for store in (one, two):
        store.refresh()
        assert all(get(store, range(6)))
    put(one, [6])
    two.refresh()
    assert get(two, [6]) == [True]
    one.forget([key_of(3), key_of(6)])
    assert get(two, [2, 3, 6]) == [True, False, False]  # even before it looks
    assert two.counts()["damaged"] == 0
    put(one, [3], version=1)
    two.refresh()
    assert get(two, [3], version=1) == [True]
    two.clear()
    assert get(one, range(7)) == [False] * 7
    assert put(one, [1]) == [True]
    two.refresh()
    assert get(two, [0, 1]) == [False, True]


def test_of_copies_the_one_that_is_removed_last_counts(path: Path) -> None:
    one, two = opened(path, TIGHT), opened(path, TIGHT)
    put(one, range(3))
    (older,) = segments_in(path)
    put(two, range(3))
    for store in (one, two):
        store.refresh()
    older.unlink()
    for store in (one, two):
        store.refresh()
        assert all(get(store, range(3)))


def test_a_store_learns_by_itself_what_others_add(path: Path) -> None:
    one, two = opened(path), opened(path, refresh_seconds=0.01)
    put(one, range(3))
    for _ in range(int(WAIT_SECONDS / 0.01)):
        if all(has(two, range(3))):
            break
        time.sleep(0.01)
    assert all(get(two, range(3)))
    two.close()


def test_the_oldest_blocks_make_room_except_those_that_were_read(path: Path) -> None:
    store = opened(path, TIGHT)
    most = 0
    for start in range(0, 600, 3):
        put(store, range(start, start + 3))
        assert all(get(store, [0, 1]))
        most = max(most, bytes_in(path))
    assert TIGHT * 0.8 < most <= TIGHT
    counts = store.counts()
    assert has(store, range(2, 300)) == [False] * 298
    assert has(store, range(500, 600)) == [True] * 100
    assert counts["num_blocks"] + counts["evicted"] == 600
    assert counts["copied"] >= 4
    store.close()
    store = opened(path, TIGHT)
    assert all(get(store, [0, 1, *range(500, 600)]))
    store.close()
    opened(path, TIGHT // 4).close()
    assert bytes_in(path) <= TIGHT // 4


def test_what_was_read_before_a_restart_is_kept_longer(path: Path) -> None:
    store = opened(path, TIGHT)
    put(store, range(200))
    assert all(get(store, [150]))
    store.close()
    store = opened(path, TIGHT)
    put(store, range(200, 400))
    assert has(store, [149, 150, 151]) == [False, True, False]
    store.close()


def test_blocks_of_identities_that_nobody_uses_make_room_first(path: Path) -> None:
    used, unused = IDENTITY._replace(rank=1), IDENTITY._replace(rank=2)
    in_use = opened(path, TIGHT, used)
    put(in_use, range(50))
    late = opened(path, TIGHT, unused)
    put(late, range(100))
    late.close()
    store = opened(path, TIGHT)
    put(store, range(100))
    assert all(has(store, range(100)))
    in_use.refresh()
    assert all(get(in_use, range(50)))
    late = opened(path, TIGHT, unused)
    assert not any(has(late, range(20)))
    late.close()
    put(store, range(100, 400))
    in_use.refresh()
    assert not any(get(in_use, range(40)))
    assert bytes_in(path) <= TIGHT


def test_no_room_while_others_append_to_all_of_it(path: Path) -> None:
    smallest = 4 * (8192 + BLOCK_BYTES)
    stores = [opened(path, smallest) for _ in range(5)]
    assert [put(store, [number]) for number, store in enumerate(stores)] == [[True]] * 4 + [[False]]
    assert bytes_in(path) <= smallest
    stores[0].close()
    assert put(stores[4], [4]) == [True]
    assert bytes_in(path) <= smallest


def test_segments_that_are_not_full_count_as_a_whole(path: Path) -> None:
    one, *others = (opened(path, TIGHT) for _ in range(7))
    for index, store in enumerate(others):
        put(store, [index])
    put(one, range(1000, 1400))
    for index, store in enumerate(others):
        put(store, range(10 * index + 10, 10 * index + 16))
        assert bytes_in(path) <= TIGHT


def test_files_are_for_their_user_only(path: Path) -> None:
    before = os.umask(0)
    try:
        filled(path / "kv", range(3))
    finally:
        os.umask(before)
    assert stat.S_IMODE((path / "kv").stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in (path / "kv").iterdir()} == {0o600}


def test_directories_that_are_refused(path: Path, tmp_path: Path) -> None:
    path.mkdir(mode=0o700)
    path.chmod(0o720)
    with pytest.raises(ConfigError, match=rf"'{path}'.*written by others.*chmod 700"):
        opened(path)
    path.chmod(0o750)  # what others can list says nothing of the blocks
    opened(path).close()
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="symbolic link: name the directory"):
        opened(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path / "file")
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(foreign, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user"):
        opened(foreign if os.geteuid() == 0 else Path("/"))
    with pytest.raises(ConfigError, match=r"kv_offload_dir_gib is .*1073 bytes.*at least 0.00003"):
        opened(path, 1073)


def test_links_in_the_directory_are_not_followed(path: Path, tmp_path: Path) -> None:
    filled(path, range(3))
    victim = tmp_path / "victim"
    (file,) = segments_in(path)
    content = file.read_bytes()
    file.rename(victim)
    file.symlink_to(victim)
    store = opened(path)
    assert has(store, range(3)) == [False] * 3
    assert victim.read_bytes() == content


class FullDisk:
    """A disk with room for some bytes of blocks."""

    def __init__(self, path: Path, room: int) -> None:
        self.path = path
        self.room = room
        self._write = os.pwritev

    def pwritev(self, fd: int, buffers, offset: int, *rest) -> int:
        used = sum(each.stat().st_blocks * 512 for each in segments_in(self.path))
        if used > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, buffers, offset, *rest)


def test_a_full_disk_refuses_blocks_and_recovers(path: Path, monkeypatch, caplog) -> None:
    store = opened(path)
    put(store, range(3))
    disk = FullDisk(path, -1)
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    for number in range(3, 8):
        assert put(store, [number]) == [False]
    assert put(store, [1]) == [True]  # there already
    assert store.counts()["refused"] == 5
    assert len(caplog.records) == 1 and str(path) in caplog.text and "No space" in caplog.text
    assert all(get(store, range(3)))
    disk.room = 1 << 40
    assert put(store, range(3, 8)) == [True] * 5
    store.close()
    assert all(get(opened(path), range(8)))


def test_on_a_full_disk_new_blocks_take_the_place_of_old_ones(path: Path, monkeypatch) -> None:
    most = 4 << 20
    store = opened(path, most)
    monkeypatch.setattr(os, "pwritev", FullDisk(path, most // 2).pwritev)
    refused = 0
    for start in range(0, 12_000, 20):
        refused += not all(put(store, range(start, start + 20)))
    assert 1 <= refused < 20
    assert all(get(store, range(11_900, 12_000)))
    store.close()


def test_while_the_disk_is_full_old_blocks_stay(path: Path, monkeypatch) -> None:
    store = opened(path, TIGHT)
    put(store, range(150))
    monkeypatch.setattr(os, "pwritev", FullDisk(path, -1).pwritev)
    for number in range(150, 200):
        assert put(store, [number]) == [False]
    assert sum(get(store, range(150))) > 120


def test_a_limit_on_the_size_of_files_refuses_blocks(path: Path) -> None:
    store = opened(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        assert put(store, range(3)) == [False] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert segments_in(path) == []
    assert put(store, range(3)) == [True] * 3
    store.close()


def test_a_lock_that_is_never_released_costs_new_segments_alone(path: Path) -> None:
    filled(path, range(3))
    files = StoreDirectory(str(path), PLENTY, IDENTITY, lock_seconds=0.01)
    store = DiskStore(files, BLOCK_BYTES, NEVER)
    with (path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(3, 40):
            assert put(store, [number]) == [False]
        store.refresh()
        assert all(get(store, range(3)))
        store.forget([key_of(0)])
    assert put(store, [3]) == [True]
    assert get(store, range(4)) == [False, True, True, True]
    store.close()


def test_the_directory_is_removed_in_use(path: Path) -> None:
    store = opened(path)
    put(store, range(3))
    shutil.rmtree(path)
    assert put(store, [4]) == [False]
    assert get(store, range(5)) == [False] * 5
    put(store, [5])
    store.refresh()
    store.forget([key_of(1)])
    store.clear()
    assert store.counts()["num_blocks"] == 0
    store.close()


def test_a_segment_that_is_cut_does_not_grow_again(path: Path) -> None:
    store = opened(path, TIGHT)
    put(store, range(3))
    (file,) = segments_in(path)
    os.truncate(file, 5000)
    assert get(store, range(3)) == [False] * 3
    assert put(store, range(3, 6)) == [True] * 3
    assert file.stat().st_size == 5000
    assert all(get(store, range(3, 6)))
    store.close()
    assert all(get(opened(path), range(3, 6)))


def test_files_are_removed_in_use(path: Path) -> None:
    store = opened(path)
    put(store, range(3))
    for each in segments_in(path):
        each.unlink()
    assert put(store, range(3, 6)) == [True] * 3
    assert get(store, range(6)) == [False] * 3 + [True] * 3
    assert put(store, range(6)) == [True] * 6
    assert all(get(store, range(6)))


def test_threads_read_while_one_writes_and_old_blocks_make_room(path: Path) -> None:
    store = opened(path, TIGHT, refresh_seconds=0.001)
    newest, failures, found = [0], [], [0]

    def read() -> None:
        try:
            while newest[0] < 600:
                now = newest[0]
                found[0] += sum(get(store, range(max(0, now - 300), now + 8, 3)))
                store.contains([key_of(now)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for each in threads:
        each.start()
    while newest[0] < 600 and not failures:
        assert all(put(store, range(newest[0], newest[0] + 5)))
        if newest[0] % 100 == 50:
            store.forget([key_of(newest[0])])
        newest[0] += 5
    for each in threads:
        each.join()
    assert not failures and found[0]
    counts = store.counts()
    assert counts["damaged"] == counts["errors"] == counts["refused"] == 0
    store.close()
