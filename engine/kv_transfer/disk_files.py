"""Segments of KV blocks on disk, and the directory that holds them.

    DIRECTORY/
        lock                       held while segments are made and removed, and while blocks are
                                   copied and withdrawn, so that no copy is missed
        IDENTITY.use               held, shared, by each process that uses blocks of this identity;
                                   its time changes when blocks are withdrawn
        IDENTITY-NUMBER.kv         a segment, locked by the process that appends to it

A segment is filled once, from front to back, and its size on disk is reserved from the start:

    header    4096 bytes: identity, number, number of slots, checksum
    table     96 bytes per slot: kind, key, checksum of the block, checksum of the entry
    marks     1 byte per slot: 1 if the block has been read
    blocks    ``block_bytes`` per slot

A block is written before its entry, so what a crash leaves is a slot without an entry, or an entry
whose checksum fails. Entries change in one way: they are withdrawn. Numbers grow with time and are
part of the checksums, so that an entry is valid only in its own slot of its own segment."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_128_digest

from engine.errors import ConfigError
from engine.kv_transfer.stores import StoreIdentity

Row = memoryview
"""The bytes of a block."""

FORMAT = 1
PAGE = 4096
HEADER_BYTES = PAGE
ENTRY = struct.Struct("<BB6x64s16s8s")
KEY_AT = 8
CONTENT_AT = KEY_AT + 64
CHECKED_BYTES = CONTENT_AT + 16
LIVE = 1
WITHDRAWN = b"\x02".ljust(ENTRY.size, b"\0")
MAX_KEY_BYTES = 64
MAX_RUN_BLOCKS = 512  # of one call of the operating system, which takes at most 1024
NO_WAIT_SECONDS = 30.0  # after waiting for the lock in vain
LOCK_SECONDS = 3.0  # the lock is held for about a millisecond, longer while blocks are copied
NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})\.kv")
USE = re.compile(r"([0-9a-f]{32})\.use")


class Shape(NamedTuple):
    """Number of slots of a segment, bytes of each, and where its parts begin."""

    num_slots: int
    block_bytes: int

    @classmethod
    def within(cls, most_bytes: int, block_bytes: int) -> Shape:
        """The largest segment of at most ``most_bytes``, but at least one slot."""
        num_slots = (most_bytes - HEADER_BYTES - PAGE) // (block_bytes + ENTRY.size + 1)
        return cls(max(1, num_slots), block_bytes)

    @property
    def marks_at(self) -> int:
        return HEADER_BYTES + self.num_slots * ENTRY.size

    @property
    def blocks_at(self) -> int:
        return -(-(self.marks_at + self.num_slots) // PAGE) * PAGE

    @property
    def num_bytes(self) -> int:
        return self.end_of(self.num_slots)

    def entry_at(self, slot: int) -> int:
        return HEADER_BYTES + slot * ENTRY.size

    def end_of(self, num_slots: int) -> int:
        """Bytes of a file of which the first ``num_slots`` slots are used."""
        return self.blocks_at + num_slots * self.block_bytes


class Lack(Enum):
    """Why an entry of the table has no key."""

    UNUSED = 1
    WITHDRAWN = 2
    DAMAGED = 3


class Entries(NamedTuple):
    """Consecutive entries of the table: keys of blocks, and checksums of their contents."""

    keys: list[bytes | Lack]
    contents: list[bytes]


class Segment:
    """An open segment. Raises ``OSError`` if an operation fails."""

    def __init__(self, fd: int, number: int, shape: Shape) -> None:
        self.fd = fd
        self.number = number
        self.shape = shape

    def append(self, slot: int, keys: Sequence[bytes], rows: Sequence[Row]) -> None:
        """Write blocks to the slots from ``slot`` on, then their entries."""
        entries = b"".join(
            self._entry(slot + index, key, xxh3_128_digest(row))
            for index, (key, row) in enumerate(zip(keys, rows, strict=True))
        )
        written = os.pwritev(self.fd, rows, self.shape.end_of(slot))
        if written == len(keys) * self.shape.block_bytes:
            written += os.pwritev(self.fd, [entries], self.shape.entry_at(slot))
        if written != len(keys) * (self.shape.block_bytes + ENTRY.size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fetch(self, slot: int, rows: Sequence[Row]) -> list[bytes | Lack]:
        """Read the blocks of the slots from ``slot`` on into ``rows``. Returns their keys; a block
        is ``DAMAGED`` also if its checksum is not that in its entry."""
        keys, contents = self.entries(slot, slot + len(rows))
        num_read = os.preadv(self.fd, rows, self.shape.end_of(slot))
        for index, row in enumerate(rows):
            is_whole = (index + 1) * self.shape.block_bytes <= num_read
            if isinstance(keys[index], bytes) and not (
                is_whole and xxh3_128_digest(row) == contents[index]
            ):
                keys[index] = Lack.DAMAGED
        return keys

    def entries(self, start: int, end: int) -> Entries:
        """Entries of the slots ``start`` to ``end``, which is not included."""
        num_bytes = (end - start) * ENTRY.size
        read = os.pread(self.fd, num_bytes, self.shape.entry_at(start)).ljust(num_bytes, b"\0")
        keys: list[bytes | Lack] = [Lack.UNUSED] * (end - start)
        contents = [b""] * (end - start)
        first = self.number + start
        for index in np.flatnonzero(_table(read).any(axis=1)).tolist():  # up to a million
            entry = read[index * ENTRY.size : (index + 1) * ENTRY.size]
            if entry[CHECKED_BYTES:] == xxh3_64_digest(entry[:CHECKED_BYTES], first + index):
                keys[index] = entry[KEY_AT : KEY_AT + entry[1]]
                contents[index] = entry[CONTENT_AT:CHECKED_BYTES]
            else:
                keys[index] = Lack.WITHDRAWN if entry == WITHDRAWN else Lack.DAMAGED
        return Entries(keys, contents)

    def withdrawn(self, end: int) -> list[int]:
        """Slots before ``end`` whose blocks have been withdrawn."""
        read = os.pread(self.fd, end * ENTRY.size, HEADER_BYTES)
        kinds = _table(read[: len(read) // ENTRY.size * ENTRY.size])[:, 0]
        slots: list[int] = np.flatnonzero(kinds == WITHDRAWN[0]).tolist()
        return slots

    def marks(self) -> bytes:
        """A byte per slot: 1 if the block has been read."""
        num_slots = self.shape.num_slots
        return os.pread(self.fd, num_slots, self.shape.marks_at).ljust(num_slots, b"\0")

    def mark(self, slot: int, count: int) -> None:
        self._replace(b"\1" * count, self.shape.marks_at + slot)

    def withdraw(self, slot: int) -> None:
        """Make the slot's block one that nobody reads again."""
        self._replace(WITHDRAWN, self.shape.entry_at(slot))

    def is_intact(self) -> bool:
        """Whether the file is there and has the size that was reserved."""
        found = os.fstat(self.fd)
        return found.st_nlink > 0 and found.st_size == self.shape.num_bytes

    def finish(self, num_used: int) -> None:
        """Release what was reserved after the first ``num_used`` slots."""
        end = self.shape.end_of(num_used)
        if os.fstat(self.fd).st_size > end:
            os.ftruncate(self.fd, end)

    def _replace(self, part: bytes, place: int) -> None:
        """Write over what is there: a file that somebody has cut must not grow."""
        if place + len(part) <= os.fstat(self.fd).st_size:
            os.pwrite(self.fd, part, place)

    def _entry(self, slot: int, key: bytes, content: bytes) -> bytes:
        entry = ENTRY.pack(LIVE, len(key), key, content, b"")
        return entry[:CHECKED_BYTES] + xxh3_64_digest(entry[:CHECKED_BYTES], self.number + slot)


class SegmentName(NamedTuple):
    """The name of a segment's file: identity as 32 hex digits, and number."""

    identity: str
    number: int

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        found = NAME.fullmatch(name)
        return cls(found[1], int(found[2], 16)) if found else None

    def __str__(self) -> str:
        return f"{self.identity}-{self.number:016x}.kv"


class StoreDirectory:
    """A directory of segments, whose files together have at most ``most_bytes`` bytes. Several
    processes may use it at once. Methods raise ``OSError``."""

    def __init__(
        self,
        path: str,
        most_bytes: int,
        identity: StoreIdentity,
        *,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        """``lock_seconds``: how long to wait for the lock.

        Raises ``ConfigError`` if the directory cannot be used, or is open to others."""
        self.path = path
        self.most_bytes = most_bytes
        self.identity = _digest(identity)
        self._about = identity._asdict() | {"namespace": identity.namespace[:200]}
        self._fd = _open_directory(path)
        self._held = [self._fd]
        self._depth = 0
        self._lock_seconds = lock_seconds
        self._no_wait_until = 0.0
        try:
            self._lock = self._held_file("lock")
            with self.locked():
                self._remove_unused_names()
                self._used = self._held_file(f"{self.identity}.use")
                fcntl.flock(self._used, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._shrink()
        except OSError as error:
            self.close()
            raise _unusable(path, error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory, for one thread at a time; it may be taken again inside.
        Raises ``TimeoutError`` if another process does not release it; then at once for a while."""
        start = time.monotonic()
        while not _lock(self._lock):
            now = time.monotonic()
            if now < self._no_wait_until or now > start + self._lock_seconds:
                self._no_wait_until = max(self._no_wait_until, now + NO_WAIT_SECONDS)
                raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock")
            time.sleep(0.001)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def names(self) -> list[SegmentName]:
        """The segments of all identities."""
        return [name for each in os.listdir(self._fd) if (name := SegmentName.parse(each))]

    def own_names(self) -> list[SegmentName]:
        """The segments of this identity."""
        return [name for name in self.names() if name.identity == self.identity]

    @contextmanager
    def opened(self, name: SegmentName) -> Iterator[Segment | None]:
        """Open a segment of this identity; ``None``: its header is damaged."""
        fd = self._open(str(name), os.O_RDWR)
        try:
            yield self.segment(name, fd)
        finally:
            os.close(fd)

    def segment(self, name: SegmentName, fd: int) -> Segment | None:
        """An open file as a segment of this identity; ``None``: its header is damaged."""
        shape = self._shape_of(os.pread(fd, HEADER_BYTES, 0), name.number)
        return Segment(fd, name.number, shape) if shape else None

    def create(self, shape: Shape) -> tuple[SegmentName, Segment]:
        """Make an empty segment, to be closed by the caller. To be called with the lock held, after
        ``make_room``."""
        number = max([time.time_ns(), *(name.number + 1 for name in self.names())])
        name = SegmentName(self.identity, number)
        fd = self._open(str(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, shape.num_bytes)
            os.pwritev(fd, [self._header(number, shape)], 0)
        except OSError:
            self.remove(name)
            os.close(fd)
            raise
        return name, Segment(fd, number, shape)

    def make_room(self, num_bytes: int, removed: list[tuple[SegmentName, int]]) -> None:
        """Remove the oldest segments until ``num_bytes`` more fit, first those of identities that
        nobody uses. Never removed are segments to which processes append; if others do not suffice,
        raises ``BlockingIOError``. To be called with the lock held. Appends to ``removed`` names
        of this identity's segments with their open files, to be closed by the caller."""
        sizes = self._sizes()
        most = self.most_bytes - num_bytes
        total = sum(sizes.values())
        if total <= most:
            return
        is_used = {identity: self._is_used(identity) for identity, _ in sizes}
        for name in sorted(sizes, key=lambda name: (is_used[name.identity], name.number)):
            if total <= most:
                return
            with suppress(FileNotFoundError):
                fd = self._open(str(name), os.O_RDWR)
                if not _lock(fd):
                    os.close(fd)
                    continue
                self.remove(name)
                if name.identity == self.identity:
                    removed.append((name, fd))
                else:
                    os.close(fd)
            total -= sizes[name]
        if total > most:
            raise BlockingIOError(errno.EBUSY, f"other processes use its {self.most_bytes} bytes")

    def num_bytes(self) -> int:
        """Bytes of all segments, of all identities."""
        return sum(self._sizes().values())

    def is_finished(self, name: SegmentName) -> bool:
        """Whether no process appends to a segment. To be called with the lock held."""
        fd = self._open(str(name), os.O_RDWR)
        try:
            return _lock(fd)
        finally:
            os.close(fd)

    def remove(self, name: SegmentName) -> None:
        with suppress(FileNotFoundError):
            os.unlink(str(name), dir_fd=self._fd)

    def last_withdrawal(self) -> int:
        """When blocks of this identity were last withdrawn, in nanoseconds. Only good to compare
        for equality: clocks may be set."""
        return os.fstat(self._used).st_mtime_ns

    def note_withdrawal(self) -> None:
        """Let other processes know that blocks have been withdrawn."""
        now = time.time_ns()
        os.utime(self._used, ns=(now, now))

    def sync(self) -> None:
        """Make removals survive a failure of power."""
        os.fsync(self._fd)

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    def _held_file(self, name: str) -> int:
        self._held.append(self._open(name, os.O_RDWR | os.O_CREAT))
        return self._held[-1]

    def _sizes(self) -> dict[SegmentName, int]:
        sizes = {}
        for name in self.names():
            with suppress(FileNotFoundError):
                sizes[name] = os.stat(str(name), dir_fd=self._fd, follow_symlinks=False).st_size
        return sizes

    def _is_used(self, identity: str) -> bool:
        """Whether a process uses the blocks of an identity."""
        try:
            fd = self._open(f"{identity}.use", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not _lock(fd)
        finally:
            os.close(fd)

    def _shrink(self) -> None:
        """Remove what an earlier, larger bound allowed."""
        removed: list[tuple[SegmentName, int]] = []
        with suppress(BlockingIOError):
            self.make_room(0, removed)
        for _, fd in removed:
            os.close(fd)

    def _remove_unused_names(self) -> None:
        """Remove the empty files that identities without segments have left."""
        present = {name.identity for name in self.names()}
        for name in os.listdir(self._fd):
            found = USE.fullmatch(name)
            if found and found[1] not in present and not self._is_used(found[1]):
                os.unlink(name, dir_fd=self._fd)

    def _header(self, number: int, shape: Shape) -> bytes:
        about = {"identity": self.identity, "number": number, "num_slots": shape.num_slots}
        text = json.dumps({"format": FORMAT, **about, **self._about}).encode()
        text = text.ljust(HEADER_BYTES - 8, b"\0")
        return text + xxh3_64_digest(text)

    def _shape_of(self, header: bytes, number: int) -> Shape | None:
        text, checksum = header[:-8], header[-8:]
        if len(header) < HEADER_BYTES or checksum != xxh3_64_digest(text):
            return None
        about = json.loads(text.rstrip(b"\0"))
        if (about["identity"], about["number"]) != (self.identity, number):
            return None
        return Shape(about["num_slots"], about["block_bytes"])


def _table(read: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(read, np.uint8).reshape(-1, ENTRY.size)


def _digest(identity: StoreIdentity) -> str:
    text = json.dumps([FORMAT, *identity])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _lock(fd: int) -> bool:
    """Lock an open file, unless another holds its lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_directory(path: str) -> int:
    """Open a directory that its user alone may write to; it is made if missing."""
    try:
        if Path(path).is_symlink():
            raise ConfigError(
                f"kv_offload_dir is {path!r}, a symbolic link: name the directory that it leads to"
            )
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(path, error) from error
    found, user = os.fstat(fd), os.geteuid()
    problem = ""
    if found.st_uid != user:
        problem = f"belongs to user {found.st_uid}, and this process is user {user}: name another"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "can be written by others: run chmod 700 on it, or name another"
    if problem:
        os.close(fd)
        raise ConfigError(f"kv_offload_dir is {path!r}, which {problem}")
    return fd


def _unusable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"kv_offload_dir is {path!r}, which cannot be used: {error.strerror}; name a directory "
        "that this user can write to"
    )
