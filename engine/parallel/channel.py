"""Channel: shared memory through which one process sends messages to another one, in order.

    page 0   words    the number of pieces sent, and of pieces read; whether the group has stopped;
                      whether the receiver waits
    page 1-  slots    pieces of messages, each with a header; a piece is in slot number % slots

A message is sent for a step of the engine, and the receiver knows the step for which it waits. One
that is larger than a slot is sent in pieces. If all slots are full, the sender waits. Each word has
one writer, except that any process may stop the group. The memory has no name: it is freed when the
last process that has it mapped ends.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import RankError
from engine.ipc.sealed_files import SealedFile, SharedFile, open_sealed
from kernels.cpu.words import Word, is_supported

NAME = "metronome-channel"
PAGE = mmap.PAGESIZE
LOOKS = 20_000  # at a word, some hundred microseconds, before a process sleeps
NAP_SECONDS = 0.02  # after which a sleeping process looks whether the group has stopped
PIECE_BYTES = 1 << 20  # of a slot, at most
HEADER_BYTES = 64
Bytes = NDArray[np.uint8]

_STOPPED, _SENT, _READ, _WAITS = 0, 128, 256, 384  # offsets of words in page 0
_NUMBER, _STEP, _TOTAL, _SIZE = range(4)  # words of a header


class Shape(NamedTuple):
    """The number of slots of a channel, and the bytes of each without its header."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, message_bytes: int, num_messages: int) -> Shape:
        """The shape of a channel that holds ``num_messages`` of at most ``message_bytes``."""
        size = min(PIECE_BYTES, -(-max(1, message_bytes) // HEADER_BYTES) * HEADER_BYTES)
        return cls(num_messages * -(-max(1, message_bytes) // size), size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory; only pages that are written take room."""
        return PAGE + self.num_slots * (HEADER_BYTES + self.slot_bytes)


class Handle(NamedTuple):
    """What the processes at both ends open a channel by."""

    file: SealedFile
    shape: Shape


class ChannelMemory(SharedFile):
    """The memory of a channel, kept by the process that starts the others.

    Raises ``OSError`` if processes cannot share memory on this system."""

    def __init__(self, shape: Shape) -> None:
        if not is_supported():
            raise OSError("processes of this system cannot wait for each other")
        super().__init__(NAME, shape.num_bytes)
        self.opened = Handle(self.handle, shape)
        """With which both ends open it."""
        self._lock = Lock()  # of the file, which a thread may close while another stops the group

    def stop(self) -> None:
        """Let all waits of both ends raise ``RankError``, now and later. Any thread may call
        it."""
        with self._lock:
            if self._fd is not None:
                os.pwrite(self._fd, int(True).to_bytes(8, "little"), _STOPPED)

    @property
    def is_awaited(self) -> bool:
        """True if the receiver waits for a message, and none is there."""
        with self._lock:
            words = b"" if self._fd is None else os.pread(self._fd, _WAITS + 8, 0)
        if not words:
            return False
        waits, sent, read = (words[place : place + 8] for place in (_WAITS, _SENT, _READ))
        return any(waits) and sent == read

    def close(self) -> None:
        """Close the file. Processes that have opened its memory keep it. May be repeated."""
        with self._lock:
            super().close()


class Ends(NamedTuple):
    """Who is at the ends of a channel, and how they wait."""

    sender: int
    """Rank that sends."""
    receiver: int
    """Rank that receives."""
    spins: bool = True
    """Whether each has a processor of its own, and so looks for messages before it sleeps."""


class _End:
    """One end of a channel."""

    def __init__(self, handle: Handle | Bytes, ends: Ends, shape: Shape | None) -> None:
        """handle: of the memory, or the memory itself, for threads, whose shape is ``shape``."""
        self._ends = ends
        self._looks = LOOKS if ends.spins else 1
        self._number = 0  # pieces sent or read by this end
        if isinstance(handle, Handle):
            self._attach(_opened(handle.file), handle.shape)
        else:
            assert shape is not None
            self._attach(handle, shape)

    def close(self) -> None:
        """Let go of the memory. The group counts as stopped then. May be repeated."""
        memory = np.zeros(PAGE, np.uint8)
        memory[_STOPPED] = 1
        self._attach(memory, Shape(0, 0))
        self._number = 0

    def _attach(self, memory: Bytes, shape: Shape) -> None:
        self._memory, self._shape = memory, shape
        self._stopped = memory[_STOPPED : _STOPPED + 8].view(np.int64)
        self._waits = memory[_WAITS : _WAITS + 8].view(np.int64)
        self._sent, self._read = Word(memory, _SENT), Word(memory, _READ)

    def _slot(self, number: int) -> tuple[NDArray[np.int64], Bytes]:
        """The header of a piece, and the place of its bytes."""
        size = HEADER_BYTES + self._shape.slot_bytes
        begin = PAGE + number % self._shape.num_slots * size
        header = self._memory[begin : begin + HEADER_BYTES].view(np.int64)
        return header, self._memory[begin + HEADER_BYTES : begin + size]


class Sender(_End):
    """The sending end of a channel."""

    def __init__(self, handle: Handle | Bytes, ends: Ends, shape: Shape | None = None) -> None:
        super().__init__(handle, ends, shape)

    def send(self, step: int, message: Bytes) -> None:
        """Send a message for a step: bytes [n]. Waits while all slots are full. Raises
        ``RankError`` if the group has stopped."""
        total, begin = len(message), 0
        while begin < total or begin == 0:
            self._wait_for_room(step)
            header, place = self._slot(self._number)
            piece = message[begin : begin + self._shape.slot_bytes]
            place[: len(piece)] = piece
            header[: _SIZE + 1] = self._number, step, total, len(piece)
            self._number += 1
            self._sent.publish(self._number)
            begin += max(1, len(piece))

    def has_room(self, num_bytes: int) -> bool:
        """Whether a message of this size would be sent without waiting."""
        num_pieces = -(-max(1, num_bytes) // self._shape.slot_bytes)
        num_unread = self._number - self._read.watch(self._number, 0)
        return num_unread + num_pieces <= self._shape.num_slots

    def _wait_for_room(self, step: int) -> None:
        least = self._number - self._shape.num_slots  # pieces that must have been read
        looks, began = self._looks, 0.0
        while (seen := self._read.watch(least, looks)) <= least:
            looks, began = 1, began or time.monotonic()
            if self._stopped[0]:
                raise RankError(
                    f"the group has stopped: rank {self._ends.sender} waited until rank "
                    f"{self._ends.receiver} reads what it has sent for step {step}"
                )
            self._read.sleep(seen, NAP_SECONDS)


class Outbox:
    """Messages for a receiver that reads each only when it wants it, and may wait for this process
    until then. So those that there is no room for are kept here until they are wanted."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._kept: deque[tuple[int, Bytes]] = deque()  # steps and messages, in order of steps

    def add(self, step: int, message: Bytes) -> None:
        """Add the message of the next step. Sends it if there is room."""
        self._kept.append((step, message))
        while self._kept and self._sender.has_room(len(self._kept[0][1])):
            self._sender.send(*self._kept.popleft())

    def send(self, step: int) -> None:
        """Send the messages of all steps up to this one, which the receiver wants now. Raises
        ``RankError`` if the group has stopped."""
        while self._kept and self._kept[0][0] <= step:
            self._sender.send(*self._kept.popleft())


class Receiver(_End):
    """The receiving end of a channel."""

    def __init__(self, handle: Handle | Bytes, ends: Ends, shape: Shape | None = None) -> None:
        super().__init__(handle, ends, shape)
        self.waited_seconds = 0.0
        """Time of all waits so far, without those that found a message within some microseconds."""

    def receive(self, step: int) -> Bytes:
        """Wait for the message of a step and return its bytes [n]. Raises ``RankError`` if the
        group has stopped, or the message is of another step."""
        return self._receive(step, 0, lambda total: np.empty(total, np.uint8))

    def receive_into(self, step: int, target: Bytes) -> Bytes:
        """The same; the message begins with as many bytes as ``target`` has, which are put there.
        Returns the rest. Raises ``RankError`` also if the message is too short."""
        size = len(target)
        message = self._receive(
            step, size, lambda total: target if total == size else np.empty(total, np.uint8)
        )
        if message is not target:
            target[:] = message[:size]
        return message[size:]

    def _receive(self, step: int, least: int, place_for: Callable[[int], Bytes]) -> Bytes:
        """Receive a message of at least ``least`` bytes. place_for: for a number of bytes."""
        message, begin, total = None, 0, -1
        while begin != total:
            self._wait(step)
            header, place = self._slot(self._number)
            number, of_step, total, size = header[: _SIZE + 1].tolist()
            if message is None:
                self._check(step, least, of_step, total)
                message = place_for(total)
            assert number == self._number
            message[begin : begin + size] = place[:size]
            begin += size
            self._number += 1
            self._read.publish(self._number)
        assert message is not None
        return message

    def _check(self, step: int, num_bytes: int, sent_step: int, sent_bytes: int) -> None:
        if step != sent_step or sent_bytes < num_bytes:
            raise RankError(
                f"rank {self._ends.receiver} computes step {step} from {num_bytes} bytes, but rank "
                f"{self._ends.sender} has sent {sent_bytes} bytes of step {sent_step}: all stages "
                "must compute the same steps"
            )

    def _wait(self, step: int) -> None:
        if self._sent.watch(self._number, 0) > self._number:
            return
        began, looks = time.monotonic(), self._looks
        self._waits[0] = True
        while (seen := self._sent.watch(self._number, looks)) <= self._number:
            looks = 1
            if self._stopped[0]:
                raise RankError(
                    f"the group has stopped: rank {self._ends.receiver} waited for rank "
                    f"{self._ends.sender} in step {step}"
                )
            self._sent.sleep(seen, NAP_SECONDS)
        self._waits[0] = False
        self.waited_seconds += time.monotonic() - began


def _opened(handle: SealedFile) -> Bytes:
    fd = open_sealed(handle, NAME, to_write=True)
    try:
        return np.frombuffer(mmap.mmap(fd, handle.size), np.uint8)
    finally:
        os.close(fd)  # the mapping keeps the file
