"""Operations that processes of one machine do together, in shared memory: the sum of a tensor of
all ranks, the tensors of all ranks, and a barrier.

Each rank has a line of flags, and two slots for data, which alternate. An operation is one or more
*meetings*, which each rank counts in memory of its own. In meeting n a rank

    1 writes its data to its slot n % 2
    2 writes what it calls to word n % 2 of its line, then publishes n in its flag
    3 waits until the flags of all ranks are at least n
    4 reads the others' slots n % 2

One wait for each meeting is enough: a rank writes to slot n % 2 again in meeting n + 2, after it
has seen that all ranks have published n + 1, and so have ended to read in meeting n.

Memory order. A flag is published by an atomic exchange and read by an atomic load, both
sequentially consistent, and so a release and an acquire. What a rank has written before it
publishes n (its data) can be read by those who have seen n, and what it has read before (the
others' data of meeting n - 1) was read before anybody who has seen n writes. On x86 the load is a
plain one, since loads are not reordered with loads, nor stores with earlier loads or stores; on
ARM, where they are, it is ``ldar``, and the exchange has ``ldaxr`` and ``stlxr``, or ``swpal``.
Loops and libc's copies write with ordinary stores, or with an ``sfence`` after others. A rank that
sleeps first adds itself to the sleepers of the flag; the system then compares the flag again. The
publisher exchanges first and then reads the number of sleepers. Since all four are in one order,
either the publisher sees the sleeper, or the sleeper sees the flag.

All parts are added in order of ranks in float32 and rounded once: all ranks get the same bits, and
so do repeated runs and other ways to cut the data.

An operation is one launch, which can be recorded: numbers of meetings are not among its parameters.
It reports no error itself; see ``SharedRanks.failure``.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kernels.cpu import atomics, isa
from kernels.cpu.atomics import SHARED_WAKE
from kernels.cpu.cells import narrow, widen
from kernels.cpu.native import EXACT, Kernel, f32, i64, u8, u16

SLOT_BYTES = 1 << 18  # larger tensors are exchanged in several meetings
SPINS = 400  # checks of a flag before a rank offers its processor to others
WAIT_SECONDS = 600.0  # for another rank

_LINE = 128  # bytes; processors fetch pairs of cache lines of 64
_STOP = 0  # offset of the word that stops the group
_LINES = _LINE  # offset of the lines of flags
_SLEEPERS, _CALLS = 8, 16  # offsets in a line: after the flag, sleepers and two words of calls
_PAGE = 4096
_YIELDS = 2_000  # calls of sched_yield before a rank sleeps
_NAP_SECONDS = 0.02  # a sleeping rank looks at the stop word this often
_SCATTERED = 1 << 15  # bytes from which more than two ranks add a share each
_BLOCK = 512  # elements that are added at a time

# Words of a rank's own memory.
_COUNT, _CODE, _OTHER, _MINE, _THEIRS, _SHARED, _RANK, _SIZE, _SPINS, _NAPS, _SYSCALL = range(11)
_TIME, _CLOCK, _WAITED, _SCRATCH, _NOW, _WORDS = 11, 12, 13, 14, 15, 16

STOPPED, LATE, DIFFERENT = 1, 2, 3
ALL_REDUCE, ALL_GATHER, BARRIER = 1, 2, 3
_NAMES = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather", BARRIER: "barrier"}
_BYTES, _FLOAT32, _BFLOAT16, _FLOAT16 = 0, 1, 2, 3
_KINDS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
_KIND_NAMES = ("bytes", "bytes of float32", "bytes of bfloat16", "bytes of float16")
_LOW_BITS = 0xFFFFFFFF
_OPERATION_BIT, _KIND_BIT = 56, 48


@intrinsic
def _of_half(typing_context, bits):
    """The float32 of the bits of a float16."""

    def build(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build


@intrinsic
def _to_half(typing_context, value):
    """The bits of a float32 rounded to float16."""

    def build(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), build


@njit(**EXACT)
def _line(c, rank):
    return c[_SHARED] + _LINES + rank * _LINE


@njit(**EXACT)
def _slot(c, number, rank):
    lines = -(-(_LINES + c[_SIZE] * _LINE) // _PAGE) * _PAGE
    return c[_SHARED] + lines + ((number & 1) * c[_SIZE] + rank) * SLOT_BYTES


@njit(**EXACT)
def _copy(target, source, num_bytes):
    given, taken = u8(source, (num_bytes,)), u8(target, (num_bytes,))
    for i in range(num_bytes):
        taken[i] = given[i]


@njit(**EXACT)
def _fail(c, code, other):
    c[_CODE], c[_OTHER] = code, other
    atomics.exchange(c[_SHARED] + _STOP, code)
    return False


@njit(**EXACT)
def _wait(c, other, number):
    """Wait for a rank's flag. Returns False if the group has stopped, or the wait is too long. The
    clock is read only if the flag is not there yet."""
    if atomics.load(_line(c, other)) >= number:
        return True
    began = atomics.monotonic_ns(c[_CLOCK], c[_NOW])
    has_come = _wait_long(c, other, number)
    c[_WAITED] += atomics.monotonic_ns(c[_CLOCK], c[_NOW]) - began
    return has_come


@njit(**EXACT)
def _wait_long(c, other, number):
    flag = _line(c, other)
    spins, naps = 0, 0
    while atomics.load(flag) < number:
        spins += 1
        if spins < c[_SPINS]:
            atomics.pause()
            continue
        if atomics.load(c[_SHARED] + _STOP) != 0:
            return _fail(c, STOPPED, other)
        if spins < c[_SPINS] + _YIELDS:
            atomics.system_call(c[_SYSCALL], atomics.YIELD, 0, 0, 0)
            continue
        if naps > c[_NAPS]:
            return _fail(c, LATE, other)
        naps += 1
        atomics.add(flag + _SLEEPERS, 1)
        seen = atomics.load(flag)
        if seen < number:
            atomics.timed_wait(c[_SYSCALL], flag, seen & _LOW_BITS, c[_TIME])
        atomics.add(flag + _SLEEPERS, -1)
    return True


@njit(**EXACT)
def _meet(c, number, call):
    """Publish that this rank's data of a meeting are written, and wait for those of the others.
    Returns False if the group has stopped."""
    flag, half = _line(c, c[_RANK]), (number & 1) * 8
    i64(flag + _CALLS + half, (1,))[0] = call
    atomics.exchange(flag, number)
    if atomics.load(flag + _SLEEPERS) > 0:
        atomics.system_call(c[_SYSCALL], atomics.FUTEX, flag, SHARED_WAKE, c[_SIZE])
    for step in range(1, c[_SIZE]):
        other = (c[_RANK] + step) % c[_SIZE]
        if not _wait(c, other, number):
            return False
        theirs = i64(_line(c, other) + _CALLS + half, (1,))[0]
        if theirs != call:
            c[_THEIRS] = theirs
            return _fail(c, DIFFERENT, other)
    return True


@njit(**EXACT)
def _add(target, part, num_bytes, kind):
    """Add a part to the elements at `target`. Sums of two do not depend on their order."""
    if kind == _FLOAT32:
        total = f32(target, (num_bytes >> 2,))
        _add_up(total, part, kind)
        return
    num = num_bytes >> 1
    halves, others = u16(target, (num,)), u16(part, (num,))
    if kind == _BFLOAT16:
        for i in range(num):
            halves[i] = narrow(widen(halves[i]) + widen(others[i]))
    else:
        for i in range(num):
            halves[i] = _to_half(_of_half(halves[i]) + _of_half(others[i]))


@njit(**EXACT)
def _add_up(sums, part, kind):
    if kind == _FLOAT32:
        values = f32(part, sums.shape)
        for i in range(len(sums)):
            sums[i] += values[i]
        return
    halves = u16(part, sums.shape)
    if kind == _BFLOAT16:
        for i in range(len(sums)):
            sums[i] += widen(halves[i])
    else:
        for i in range(len(sums)):
            sums[i] += _of_half(halves[i])


@njit(**EXACT)
def _store(target, sums, kind):
    if kind == _FLOAT32:
        _copy(target, sums.ctypes.data, len(sums) * 4)
        return
    halves = u16(target, sums.shape)
    if kind == _BFLOAT16:
        for i in range(len(sums)):
            halves[i] = narrow(sums[i])
    else:
        for i in range(len(sums)):
            halves[i] = _to_half(sums[i])


@njit(**EXACT)
def _sum(c, number, x, offset, num_bytes, kind):
    """Add the parts of all ranks, from `offset` of their slots on, to x, which is this rank's."""
    rank, size = c[_RANK], c[_SIZE]
    if size == 2:
        _add(x, _slot(c, number, 1 - rank) + offset, num_bytes, kind)
        return
    cell = 4 if kind == _FLOAT32 else 2
    for begin in range(0, num_bytes, _BLOCK * cell):
        sums = f32(c[_SCRATCH], (min(_BLOCK, (num_bytes - begin) // cell),))
        sums[:] = 0
        for other in range(size):
            part = x if other == rank else _slot(c, number, other) + offset
            _add_up(sums, part + begin, kind)
        _store(x + begin, sums, kind)


@njit(**EXACT)
def _next(c):
    c[_COUNT] += 1
    return c[_COUNT]


@njit(**EXACT)
def _direct(c, x, num_bytes, kind, call):
    """Each rank adds everything."""
    number = _next(c)
    _copy(_slot(c, number, c[_RANK]), x, num_bytes)
    if not _meet(c, number, call):
        return False
    _sum(c, number, x, 0, num_bytes, kind)
    return True


@njit(**EXACT)
def _shared_out(c, x, num_bytes, kind, call):
    """Each rank adds a share, which the others copy."""
    rank, size = c[_RANK], c[_SIZE]
    share = -(-num_bytes // (size * _LINE)) * _LINE
    begin = min(rank * share, num_bytes)
    own = min(share, num_bytes - begin)
    number = _next(c)
    _copy(_slot(c, number, rank), x, num_bytes)
    if not _meet(c, number, call):
        return False
    later = _next(c)
    _sum(c, number, x + begin, begin, own, kind)
    _copy(_slot(c, later, rank), x + begin, own)
    if not _meet(c, later, call):
        return False
    for other in range(size):
        if other != rank:
            first = min(other * share, num_bytes)
            _copy(x + first, _slot(c, later, other), min(share, num_bytes - first))
    return True


@njit(**EXACT)
def _all_reduce(c, x, num_bytes, kind, call):
    for begin in range(0, num_bytes, SLOT_BYTES):
        num = min(SLOT_BYTES, num_bytes - begin)
        if c[_SIZE] > 2 and num >= _SCATTERED:
            goes_on = _shared_out(c, x + begin, num, kind, call)
        else:
            goes_on = _direct(c, x + begin, num, kind, call)
        if not goes_on:
            return


@njit(**EXACT)
def _all_gather(c, x, out, num_bytes, call):
    rank = c[_RANK]
    for begin in range(0, num_bytes, SLOT_BYTES):
        num = min(SLOT_BYTES, num_bytes - begin)
        number = _next(c)
        _copy(_slot(c, number, rank), x + begin, num)
        _copy(out + rank * num_bytes + begin, x + begin, num)
        if not _meet(c, number, call):
            return
        for other in range(c[_SIZE]):
            if other != rank:
                _copy(out + other * num_bytes + begin, _slot(c, number, other), num)


def _body(row):
    p = i64(row, (7,))  # counter, own memory, operation, kind, x, out, bytes
    c = i64(p[1], (_WORDS,))
    call = (p[2] << _OPERATION_BIT) | (p[3] << _KIND_BIT) | p[6]
    if c[_CODE] == 0:
        c[_MINE] = call
        if p[2] == ALL_REDUCE:
            _all_reduce(c, p[4], p[6], p[3], call)
        elif p[2] == ALL_GATHER:
            _all_gather(c, p[4], p[5], p[6], call)
        else:
            _meet(c, _next(c), call)


COLLECTIVE = Kernel(_body, heavy=True, exact=True)


class Failure(NamedTuple):
    """Why an operation of this rank has failed. code: STOPPED: the group was stopped while this
    rank waited for rank ``other``; LATE: that rank did not call the operation in time; DIFFERENT:
    it called another one."""

    code: int
    other: int
    mine: str  # what this rank called, e.g. "all_reduce of 4096 bytes of float32"
    theirs: str
    number: int  # of the meeting, from 1


def shared_bytes(size: int) -> int:
    """Bytes of the memory that ``size`` ranks share."""
    lines = -(-(_LINES + size * _LINE) // _PAGE) * _PAGE
    return lines + 2 * size * SLOT_BYTES


class SharedRanks:
    """One rank's operations in shared memory.

    memory: ``shared_bytes(size)`` bytes, zeros at first, shared by all ranks, which must have the
    same ``SLOT_BYTES``. num_threads: computing threads of all ranks of this machine; if they are
    more than the processors, ranks do not spin while they wait. wait_seconds: how long a rank waits
    for another one."""

    def __init__(
        self,
        memory: NDArray[np.uint8],
        rank: int,
        size: int,
        *,
        num_threads: int,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        assert atomics.IS_SUPPORTED and len(memory) >= shared_bytes(size)
        self.rank = rank
        self.size = size
        COLLECTIVE.prepare()
        self._memory = memory
        self._words = np.zeros(_WORDS, np.int64)
        self._scratch = np.zeros(_BLOCK, np.float32)
        self._time = np.array([0, round(_NAP_SECONDS * 1e9)], np.int64)
        words = self._words
        words[_SHARED], words[_RANK], words[_SIZE] = memory.ctypes.data, rank, size
        words[_SPINS] = SPINS if num_threads <= num_processors() else 1
        self.limit(wait_seconds)
        words[_SYSCALL] = atomics.syscall_address()
        words[_TIME], words[_SCRATCH] = self._time.ctypes.data, self._scratch.ctypes.data
        self._now = np.zeros(2, np.int64)
        words[_CLOCK], words[_NOW] = atomics.clock_address(), self._now.ctypes.data
        self._address = words.ctypes.data
        self._code = words.data[_CODE : _CODE + 1]
        self._waited = words.data[_WAITED : _WAITED + 1]

    def limit(self, wait_seconds: float) -> None:
        """Set how long this rank waits for another one."""
        self._words[_NAPS] = max(1, round(wait_seconds / _NAP_SECONDS))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up a contiguous tensor of all ranks, in place, and return it."""
        kind = _KINDS[x.dtype]
        if kind == _FLOAT16 and not isa.widens_float16():
            return x.copy_(self.all_reduce(x.float()))
        self._run(ALL_REDUCE, kind, x.data_ptr(), 0, x.nbytes)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The contiguous tensors of all ranks, [size, *x.shape]."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._run(ALL_GATHER, _BYTES, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._run(BARRIER, _BYTES, 0, 0, 0)

    def stop(self) -> None:
        """Let operations in which a rank must wait fail. Any thread of any rank may call this."""
        self._memory[_STOP : _STOP + 8].view(np.int64)[0] = STOPPED
        wake = ctypes.CDLL(None).syscall
        for rank in range(self.size):
            flag = self._memory.ctypes.data + _LINES + rank * _LINE
            number, address, most = atomics.FUTEX, ctypes.c_void_p(flag), self.size
            wake(number, address, SHARED_WAKE, most, None, None, 0)

    @property
    def waited_ns(self) -> int:
        """Nanoseconds in which this rank has waited for others so far."""
        return self._waited[0]

    @property
    def has_failed(self) -> bool:
        """True if an operation of this rank has failed; later ones do nothing."""
        return self._code[0] != 0

    @property
    def failure(self) -> Failure | None:
        """Why an operation of this rank has failed."""
        if not self.has_failed:
            return None
        code, other, mine, theirs = self._words[_CODE : _THEIRS + 1].tolist()
        return Failure(code, other, _named(mine), _named(theirs), int(self._words[_COUNT]))

    def _run(self, *parameters: int) -> None:
        COLLECTIVE.run(1, self._address, *parameters)


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _named(call: int) -> str:
    name = _NAMES.get(call >> _OPERATION_BIT, "no operation")
    kind = _KIND_NAMES[(call >> _KIND_BIT) & 3]
    num_bytes = call & ((1 << _KIND_BIT) - 1)
    return name if name == "barrier" else f"{name} of {num_bytes} {kind}"
