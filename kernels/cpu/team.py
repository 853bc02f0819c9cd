"""Helper threads that run a kernel body (a job) together with the thread that starts it.

OpenMP ends a loop when *every* thread has arrived, even one that found no work. If another program
uses a core, each operation then waits a scheduling quantum, and a step of a few milliseconds takes
a hundred. Here helpers may join a job only while its leading thread still works on it, and the
leader waits only for helpers that joined.

Idle helpers spin for some hundred microseconds for the next job and then sleep.
"""

from __future__ import annotations

import os
import threading

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from kernels.cpu import atomics
from kernels.cpu.atomics import FUTEX, FUTEX_WAIT, FUTEX_WAKE, YIELD
from kernels.cpu.disk_cache import cache_of_these_sources

# Byte offsets in the control block; each word has its own cache line.
_EPOCH = 0  # number of jobs started; sleeping helpers wait on it
_STATE = 64  # helpers inside the job, plus _CLOSED while it is closed
_SLEEPERS = 128
_BUSY = 192  # 1 while some thread leads a job
_JOB = 256  # body, row of parameters, helpers wanted
_BLOCK_BYTES = 320

JOB_WORDS = 24  # int64 words of a job in ``launch_all``

_CLOSED = 1 << 40
_SPINS = 20_000  # checks of the epoch before a helper sleeps
_PATIENCE = 2_000  # checks of the helpers inside before the leader yields its core
_LOW_BITS = 0xFFFFFFFF


@intrinsic
def _words(typing_context, address):
    kind = types.CPointer(types.int64)

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.intp), build


def _serve(control, syscall):
    """Main loop of a helper thread: wait for a job, join it if it is still open, and run its
    body."""
    seen = atomics.load(control + _EPOCH)
    job = carray(_words(control + _JOB), (3,))
    while True:
        spins = 0
        while atomics.load(control + _EPOCH) == seen:
            spins += 1
            if spins < _SPINS:
                atomics.pause()
            else:
                atomics.add(control + _SLEEPERS, 1)
                atomics.system_call(syscall, FUTEX, control + _EPOCH, FUTEX_WAIT, seen & _LOW_BITS)
                atomics.add(control + _SLEEPERS, -1)
        seen = atomics.load(control + _EPOCH)
        # While the job is closed, the state exceeds any number of helpers.
        if atomics.add(control + _STATE, 1) < job[2]:
            atomics.call_body(job[0], job[1])
        atomics.add(control + _STATE, -1)


@njit(inline="always")
def _lead(control, syscall, body, row, helpers):
    job = carray(_words(control + _JOB), (3,))
    job[0], job[1], job[2] = body, row, helpers
    atomics.add(control + _STATE, -_CLOSED)
    atomics.add(control + _EPOCH, 1)
    if atomics.load(control + _SLEEPERS) > 0:
        atomics.system_call(syscall, FUTEX, control + _EPOCH, FUTEX_WAKE, helpers)
    atomics.call_body(body, row)
    atomics.add(control + _STATE, _CLOSED)
    spins = 0
    while atomics.load(control + _STATE) != _CLOSED:
        spins += 1
        if spins % _PATIENCE == 0:
            atomics.system_call(syscall, YIELD, 0, 0, 0)
        atomics.pause()


@njit(inline="always")
def _run(control, syscall, body, threads, parameters):
    _share(control, syscall, body, threads, atomics.lay_out(parameters))


@njit(inline="always")
def _share(control, syscall, body, threads, row):
    # If another thread is leading a job, this one runs without helpers.
    if threads > 1 and atomics.exchange(control + _BUSY, 1) == 0:
        _lead(control, syscall, body, row, threads - 1)
        atomics.exchange(control + _BUSY, 0)
    else:
        atomics.call_body(body, row)


def _launch(control, syscall, body, threads, *parameters):
    """Run a kernel body with up to threads - 1 helpers. It gets an item counter, at first 0, and
    the parameters."""
    _run(control, syscall, body, threads, parameters)


def _launch_nogil(control, syscall, body, threads, *parameters):
    """Like `_launch`, but without the GIL. (Two functions, because Numba's disk cache identifies
    them by name.)"""
    _run(control, syscall, body, threads, parameters)


def _launch_all(control, syscall, jobs, num):
    """Run bodies one after the other. jobs: address of `num` records of JOB_WORDS int64, each with
    the body, the number of threads, the item counter and the parameters."""
    for index in range(num):
        place = jobs + index * (JOB_WORDS * 8)
        job = carray(_words(place), (3,))
        job[2] = 0
        _share(control, syscall, job[0], job[1], place + 16)


with cache_of_these_sources() as is_writable:
    _serve_compiled = njit(cache=is_writable, nogil=True)(_serve)
    launch = njit(cache=is_writable)(_launch)
    launch_nogil = njit(cache=is_writable, nogil=True)(_launch_nogil)
    launch_all = njit(cache=is_writable, nogil=True)(_launch_all)


class Team:
    """The helper threads of this process, and the memory through which they get jobs."""

    def __init__(self) -> None:
        self.syscall = atomics.syscall_address()
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start)

    num_threads = 0  # threads of a large kernel; 0: torch's number

    def _start(self) -> None:
        """Begin without helper threads. Also called in a forked process, which inherits none."""
        self._lock = threading.Lock()
        self._block = np.zeros(_BLOCK_BYTES // 8 + 8, np.int64)
        self.control = self._block.ctypes.data + -self._block.ctypes.data % 64
        self._block[(self.control - self._block.ctypes.data + _STATE) // 8] = _CLOSED
        self.size = 1

    def grow(self, size: int) -> None:
        """Start helpers until there are at least `size` threads, including the caller."""
        with self._lock:
            while atomics.IS_SUPPORTED and self.size < size:
                life = threading.Thread(
                    target=_serve_compiled, args=(self.control, self.syscall), daemon=True
                )
                life.name = f"kernels-{self.size}"
                life.start()
                self.size += 1


TEAM = Team()
