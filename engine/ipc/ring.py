"""Ring: shared memory through which one process sends messages to several others, in order.

    pages 0-1  state    whether the group has stopped; the number of bytes written; a bell
               readers  for each: the bytes read, and what it reports (``NUM_WORDS`` words)
    page 2-    the bytes, as a ring: pieces of messages, each with a header

Each word has one writer, except that any process may stop the group. A reader sleeps on the bell,
which the writer changes after each piece. The file has no name: its memory is freed when the last
process that has it mapped ends. A piece carries its number and a checksum, so one that is read
twice, or not at all, is found. The checksum also tells a reader whether all of a piece has arrived
in its processor's view, whatever the order in which the stores of another become visible.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
import zlib

from engine.errors import EngineError, WireError
from engine.ipc.sealed_files import SealedFile, SharedFile, open_sealed

NAME = "metronome-ring"
FORMAT = int.from_bytes(b"ring0002", "little")
PAGE = 4096
STATE_BYTES = 2 * PAGE
NUM_BYTES = 1 << 20
MOST_READERS = 60
NUM_WORDS = 15  # that a reader reports, besides how far it has read: two cache lines together
SPIN_SECONDS = 500e-6  # of a wait, before it sleeps
TORN_SECONDS = 1.0  # in which a piece must have arrived as a whole
NAP_SECONDS = 0.5e-3  # of the writer, while a reader is a whole ring late

_FORMAT, _SIZE, _STOPPED, _WRITTEN, _BELL = 0, 1, 8, 16, 24  # indices of 64-bit words of the state
_READERS, _LINE = 32, 16  # index of the first reader's words, and words of each reader
_HEADER = struct.Struct("<QIIII")  # number, bytes, checksum, whether the message goes on, unused
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # between processes
_EVERYBODY = 1 << 30
_HALF = 0xFFFFFFFF


class Stopped(Exception):
    """The group was stopped while a process waited for another."""


class RingError(EngineError):
    """A message was damaged, read twice, or not read at all."""


class _Memory:
    """The mapped memory of a ring: words of the state, and the bytes of the ring."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size)
        with memoryview(self._map) as view:
            self.words = view[:STATE_BYTES].cast("q")
            self.ring = view[STATE_BYTES:]
        self._bell = 8 * _BELL + ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._futex = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL

    def wake(self) -> None:
        """Change the bell, and wake all who sleep on it."""
        self.words[_BELL] = self.words[_BELL] + 1 & _HALF
        self._call(_FUTEX_WAKE, _EVERYBODY)

    def sleep(self, bell: int) -> None:
        """Sleep until the bell differs from ``bell``. May return early."""
        self._call(_FUTEX_WAIT, bell)

    def stop(self) -> None:
        self.words[_STOPPED] = 1
        self.wake()

    def close(self) -> None:
        """Let go of the memory, and of the number of its file. Nothing may use it any more."""
        self.words.release()
        self.ring.release()
        self._map.close()

    def _call(self, operation: int, value: int) -> None:
        arguments = (_FUTEX, self._bell, operation, value)
        self._futex(*map(ctypes.c_long, arguments), None, None, ctypes.c_long(0))


class RingWriter(SharedFile):
    """The writing end. It makes the ring, which readers open by its ``handle``.

    Raises ``OSError`` if the system has no anonymous memory that other processes can open."""

    def __init__(self, num_readers: int, num_bytes: int = NUM_BYTES) -> None:
        """num_bytes: of the ring, a multiple of 4096. Longer messages are sent in pieces."""
        assert 0 <= num_readers <= MOST_READERS and num_bytes % PAGE == 0
        if not _FUTEX:
            raise OSError(f"processes on {platform.machine()} cannot wait for each other")
        self.num_readers = num_readers
        self._size = num_bytes
        super().__init__(NAME, STATE_BYTES + num_bytes)
        assert self._fd is not None
        try:
            self._memory = _Memory(self._fd, STATE_BYTES + num_bytes)
        except BaseException:
            super().close()
            raise
        self._memory.words[_FORMAT] = FORMAT
        self._memory.words[_SIZE] = num_bytes
        self._written = 0
        self._number = 0
        self.num_sent = 0
        """Messages sent so far, or about to be."""

    def send(self, *parts: bytes) -> None:
        """Send a message, the concatenation of ``parts``, to all readers. Waits for a reader that
        is a whole ring late. Raises ``Stopped``."""
        message = parts[0] if len(parts) == 1 else b"".join(parts)
        most = self._size // 4 - _HEADER.size
        self.num_sent += 1
        for begin in range(0, max(1, len(message)), most):
            self._send(message[begin : begin + most], begin + most < len(message))

    def stop(self) -> None:
        """End all waits of all ends of this ring, now and later. Any thread may call it."""
        self._memory.stop()

    @property
    def is_stopped(self) -> bool:
        return self._memory.words[_STOPPED] != 0

    @property
    def num_written(self) -> int:
        """Bytes written so far."""
        return self._written

    def num_read(self, reader: int) -> int:
        """Bytes that a reader has read so far."""
        return self._memory.words[_READERS + _LINE * reader]

    def reported(self, reader: int, index: int) -> int:
        """The word that a reader has reported last, ``index`` of ``NUM_WORDS``; 0: none yet."""
        return self._memory.words[_READERS + _LINE * reader + 1 + index]

    def num_begun(self, reader: int) -> int:
        """The operations with others that a reader has begun; 0, since those who wait for others in
        shared memory know for whom."""
        return 0

    def close(self) -> None:
        """Let go of the memory, which goes with the last process that has it mapped. The ring has
        stopped then. May be repeated."""
        if self._fd is not None:
            super().close()
            self._memory.close()
            self._memory = _Memory(-1, STATE_BYTES)
            self._memory.stop()

    # -- helpers

    def _send(self, piece: bytes, goes_on: bool) -> None:
        size = _HEADER.size + len(piece)
        self._make_room(size)
        header = _HEADER.pack(self._number, len(piece), zlib.crc32(piece), goes_on, 0)
        self._put(self._written, header)
        self._put(self._written + _HEADER.size, piece)
        self._number += 1
        self._written += size
        self._memory.words[_WRITTEN] = self._written
        self._memory.wake()

    def _put(self, place: int, data: bytes) -> None:
        begin = place % self._size
        first = min(len(data), self._size - begin)
        self._memory.ring[begin : begin + first] = data[:first]
        if first < len(data):
            self._memory.ring[: len(data) - first] = data[first:]

    def _make_room(self, size: int) -> None:
        if self.is_stopped:
            raise Stopped
        for reader in range(self.num_readers):
            spin_until = 0.0
            while self._written + size - self.num_read(reader) > self._size:
                if self.is_stopped:
                    raise Stopped
                now = time.monotonic()
                spin_until = spin_until or now + SPIN_SECONDS
                if now < spin_until:
                    os.sched_yield()
                else:
                    time.sleep(NAP_SECONDS)


class RingReader:
    """A reading end, in another process."""

    def __init__(self, handle: SealedFile, number: int, *, spin_seconds: float = SPIN_SECONDS):
        """number: of this reader; spin_seconds: how long a wait looks for a message before it
        sleeps. Raises ``WireError`` if the ring cannot be opened."""
        fd = open_sealed(handle, NAME, to_write=True)
        try:
            self._memory = _Memory(fd, handle.size)
        finally:
            os.close(fd)
        if self._memory.words[_FORMAT] != FORMAT:
            raise WireError(f"{handle} is no ring of this version")
        self._size = self._memory.words[_SIZE]
        self._own = _READERS + _LINE * number
        self._spin_seconds = spin_seconds
        self._read = 0
        self._number = 0

    def receive(self) -> bytes:
        """Wait for the next message. Raises ``Stopped``, and ``RingError`` for a message that is
        damaged or out of order."""
        pieces = []
        goes_on = True
        while goes_on:
            piece, goes_on = self._receive()
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def report(self, index: int, value: int) -> None:
        """Let the writer see a word, ``index`` of ``NUM_WORDS``."""
        self._memory.words[self._own + 1 + index] = value

    def stop(self) -> None:
        """End all waits of all ends of this ring, now and later. Any thread may call it."""
        self._memory.stop()

    # -- helpers

    def _receive(self) -> tuple[bytes, bool]:
        self._wait()
        torn_until = 0.0
        while True:
            number, size, checksum, goes_on, _ = _HEADER.unpack(self._get(self._read, _HEADER.size))
            if number == self._number and size <= self._size:
                piece = self._get(self._read + _HEADER.size, size)
                if zlib.crc32(piece) == checksum:
                    break
            now = time.monotonic()
            torn_until = torn_until or now + TORN_SECONDS
            if now > torn_until:
                found = f"number {number}" if number != self._number else "damaged"
                raise RingError(
                    f"message {self._number} of the core is {found}: a message was lost, was "
                    "read twice, or the memory of the ring was overwritten"
                )
            os.sched_yield()
        self._number += 1
        self._read += _HEADER.size + size
        self._memory.words[self._own] = self._read
        return piece, bool(goes_on)

    def _wait(self) -> None:
        words = self._memory.words
        spin_until = 0.0
        while True:
            bell = words[_BELL]
            if words[_STOPPED]:
                raise Stopped
            if words[_WRITTEN] != self._read:
                return
            now = time.monotonic()
            spin_until = spin_until or now + self._spin_seconds
            if now < spin_until:
                os.sched_yield()
            else:
                self._memory.sleep(bell)

    def _get(self, place: int, size: int) -> bytes:
        begin = place % self._size
        first = min(size, self._size - begin)
        data = bytes(self._memory.ring[begin : begin + first])
        return data if first == size else data + bytes(self._memory.ring[: size - first])
