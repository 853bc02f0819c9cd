"""Compiled loops, addressed rather than passed arrays.

A *body* is a Python function of one argument, the address of a row of 64-bit parameters, compiled
by Numba to machine code. Every thread of the team runs it and takes work items from an atomic
counter in parameter 0, so a thread that the machine slows down takes fewer. Addresses instead of
arrays keep a call at about a microsecond and each body at one compilation for all shapes.

Numba's own parallel loops are not used: they bring a second OpenMP runtime next to torch's, and two
sets of threads that spin for each other's cores cost more than the loops save.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from kernels.cpu.disk_cache import cache_of_these_sources, is_kept
from kernels.cpu.team import TEAM, launch, launch_all, launch_nogil

# All of fast math but "no NaNs" and "no infinities": what is not finite must come out not finite.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}

# Options of functions that only compiled code calls: nothing is compiled to call them from Python.
INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INLINE = {**INNER, "fastmath": FAST, "error_model": "numpy", "forceinline": True}
# Each operation is rounded as it is written: bodies that compute the same thing give the same bits.
# (What is not given here would be that of the function that is compiled at the moment.)
EXACT = {**INLINE, "fastmath": False}

_I64 = ir.IntType(64)
_SIGNATURE = types.void(types.intp)


def _array_at(dtype: types.Type) -> Callable[..., Any]:
    """What a body reads and writes memory through: ``array(address, shape)``."""
    size = dtype.bitwidth // 8

    @intrinsic
    def array(typing_context, address, shape):
        result = types.Array(dtype, len(shape), "C")

        def build(context, builder, signature, args):
            made = make_array(result)(context, builder)
            extents = cgutils.unpack_tuple(builder, args[1])
            strides = [ir.Constant(_I64, size)]
            for extent in extents[:0:-1]:
                strides.insert(0, builder.mul(strides[0], extent))
            kind = context.get_data_type(dtype).as_pointer()
            data = builder.inttoptr(args[0], kind)
            populate_array(made, data, extents, strides, size, meminfo=None)
            return made._getvalue()

        return result(types.intp, types.UniTuple(types.intp, len(shape))), build

    return array


# The contiguous array of `shape`, a tuple, that starts at an address.
f32, f64 = _array_at(types.float32), _array_at(types.float64)
i32, i64 = _array_at(types.int32), _array_at(types.int64)
u8, u16, u64 = _array_at(types.uint8), _array_at(types.uint16), _array_at(types.uint64)


@intrinsic
def next_item(typing_context, counter):
    """Take one from the counter at the address; every thread gets another number."""

    def build(context, builder, signature, args):
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, _I64(1), "acq_rel")

    return types.int64(types.intp), build


@intrinsic
def float_of_bits(typing_context, bits):
    """The float32 with these 32 bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def bits_of_float(typing_context, value):
    """The 32 bits of a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), build


@lru_cache(maxsize=256)
def bits(value: float) -> int:
    """A float as the parameter a body reads back through :func:`f64`."""
    return struct.unpack("q", struct.pack("d", value))[0]


def _nothing() -> None:
    pass


# Parameters are filled up to one of two numbers: what launches is compiled for each number anew.
_NUMBERS = (12, 20)
_FILLED_UP = [
    (0,) * (next(number for number in _NUMBERS if number >= given) - given)
    for given in range(_NUMBERS[-1] + 1)
]


def prepare_launches() -> None:
    """Compile what starts bodies, or load it from the cache."""
    for number in _NUMBERS:
        for launched in (launch, launch_nogil):
            launched.compile((types.int64,) * 4 + (types.UniTuple(types.int64, number),))
    launch_all.compile((types.int64,) * 4)


class NativeLaunch(NamedTuple):
    """One run of a body."""

    body: int
    threads: int
    parameters: tuple[int, ...]


_NOTES: dict[int, list[NativeLaunch]] = {}  # by thread that takes them


@contextmanager
def noted() -> Iterator[list[NativeLaunch]]:
    """What this thread launches meanwhile."""
    thread = threading.get_ident()
    notes = _NOTES[thread] = []
    try:
        yield notes
    finally:
        del _NOTES[thread]


def is_recorded() -> bool:
    """Whether this thread's launches are noted at this moment."""
    return threading.get_ident() in _NOTES


class Kernel:
    """A body, compiled when first run and kept in Numba's cache on disk.

    heavy: let other Python threads run meanwhile; worth it from some tens of microseconds.
    """

    def __init__(self, body: Callable[[int], None], *, heavy: bool = False) -> None:
        self._body = body
        self._launch = launch_nogil if heavy else launch
        self._first: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._compiled: Any = None
        self._address = 0

    def prepare(self) -> None:
        """Compile now, or load from the cache; the first of a process also starts Numba."""
        if self._address:
            return
        self._first()
        with self._lock:
            if self._compiled is None:
                with cache_of_these_sources() as is_writable:
                    options = {"cache": is_writable, "fastmath": FAST, "error_model": "numpy"}
                    self._compiled = cfunc(_SIGNATURE, **options)(self._body)
            self._address = self._compiled.address

    @property
    def is_kept(self) -> bool:
        """Whether it is found on disk, and need not be compiled."""
        return self._compiled is not None or is_kept(self._body, _SIGNATURE)

    def compile_after(self, wait: Callable[[], None]) -> None:
        """Call this before it is compiled or loaded: another process may have it ready then."""
        self._first = wait

    def assembly(self) -> str:
        """The machine code as text, for who looks into it."""
        self.prepare()
        text: str = self._compiled._library.get_asm_str()
        return text

    def run(self, threads: int, *parameters: int) -> None:
        """Parameter i is at index i + 1 of the body's row."""
        if threads > TEAM.size:
            TEAM.grow(threads)
        if not self._address:
            self.prepare()
        if _NOTES and (notes := _NOTES.get(threading.get_ident())) is not None:
            notes.append(NativeLaunch(self._address, threads, parameters))
        given = len(parameters)
        self._launch(
            TEAM.control, TEAM.syscall, self._address, threads, *parameters, *_FILLED_UP[given]
        )
