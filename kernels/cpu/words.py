"""64-bit words in memory that processes share: publishing one, and waiting for one to grow.

Both are sequentially consistent: what a process has written before it publishes a word can be read
by those who have seen the word (see ``kernels.cpu.collectives``).
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
from numba import njit

from kernels.cpu import atomics
from kernels.cpu.atomics import SHARED_WAIT, SHARED_WAKE
from kernels.cpu.disk_cache import cache_of_these_sources

_EVERYBODY = 1 << 30
_LOW_BITS = 0xFFFFFFFF
_YIELD_EACH = 64  # looks at the word, before the processor is offered to others


def _publish(address, value):
    return atomics.exchange(address, value)


def _watch(syscall, address, seen, looks):
    """Look at a word until it exceeds ``seen``, at most ``looks`` times. Returns the word."""
    found = atomics.load(address)
    for number in range(looks):
        if found > seen:
            break
        if number % _YIELD_EACH == _YIELD_EACH - 1:
            atomics.system_call(syscall, atomics.YIELD, 0, 0, 0)
        atomics.pause()
        found = atomics.load(address)
    return found


with cache_of_these_sources() as is_writable:
    publish = njit(cache=is_writable)(_publish)
    watch = njit(cache=is_writable, nogil=True)(_watch)


class Word:
    """A word of which one process publishes ever larger values, while others wait for them."""

    def __init__(self, memory: np.ndarray, offset: int) -> None:
        """memory: shared, uint8; offset: of the word, in bytes, a multiple of 8."""
        self._memory = memory
        self._address = memory.ctypes.data + offset
        self._syscall = atomics.syscall_address()
        self._futex = ctypes.CDLL(None).syscall  # releases the GIL
        self.value = memory[offset : offset + 8].view(np.int64)

    def publish(self, value: int) -> None:
        """Show a value to the others, and wake those who sleep."""
        publish(self._address, value)
        self.wake()

    def wake(self) -> None:
        """Wake those who sleep until this word changes."""
        self._call(SHARED_WAKE, _EVERYBODY, None)

    def watch(self, seen: int, looks: int) -> int:
        """Look at most ``looks`` + 1 times whether the word exceeds ``seen``. Returns it."""
        return int(watch(self._syscall, self._address, seen, looks))

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until the word differs from ``seen``, or for some seconds. May return early."""
        whole = int(seconds)
        limit = (ctypes.c_long * 2)(whole, round((seconds - whole) * 1e9))
        self._call(SHARED_WAIT, seen & _LOW_BITS, limit)

    def _call(self, operation: int, value: int, limit: object) -> None:
        number, address = ctypes.c_long(atomics.FUTEX), ctypes.c_void_p(self._address)
        arguments = ctypes.c_long(operation), ctypes.c_long(value), limit, None, ctypes.c_long(0)
        self._futex(number, address, *arguments)


def is_supported() -> bool:
    """Whether processes of this system can wait for each other's words."""
    return atomics.IS_SUPPORTED and hasattr(os, "memfd_create")
