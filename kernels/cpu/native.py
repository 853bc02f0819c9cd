"""Compiled loops, addressed rather than passed arrays.

A *body* is a Python function of one argument, the address of a row of 64-bit parameters, compiled
by Numba to machine code. Every thread of the team runs it and takes work items from an atomic
counter in parameter 0, so a thread that the machine slows down takes fewer. Addresses instead of
arrays keep a call at about a microsecond and each body at one compilation for all shapes.

Numba's own parallel loops are not used: they bring a second OpenMP runtime beside torch's, and two
sets of threads that spin for each other's cores cost more than the loops save.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from kernels.cpu.disk_cache import cache_of_these_sources
from kernels.cpu.team import TEAM, launch, launch_nogil

# All of fast math but "no NaNs" and "no infinities": what is not finite must come out not finite.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}

# Options of functions that only compiled code calls: nothing is compiled to call them from Python.
INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INLINE = {**INNER, "fastmath": FAST, "error_model": "numpy", "forceinline": True}

_I64 = ir.IntType(64)


def _pointer_to(dtype: types.Type) -> Callable[[int], Any]:
    @intrinsic
    def cast(typing_context, address):
        signature = types.CPointer(dtype)(types.intp)

        def build(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, build

    return cast


_f32_pointer = _pointer_to(types.float32)
_f64_pointer = _pointer_to(types.float64)
_i32_pointer = _pointer_to(types.int32)
_i64_pointer = _pointer_to(types.int64)
_u8_pointer = _pointer_to(types.uint8)
_u16_pointer = _pointer_to(types.uint16)
_u64_pointer = _pointer_to(types.uint64)


@njit(inline="always")
def f32(address, shape):
    """The float32 array of `shape` that starts at `address`."""
    return carray(_f32_pointer(address), shape)


@njit(inline="always")
def i32(address, shape):
    """The int32 array of `shape` that starts at `address`."""
    return carray(_i32_pointer(address), shape)


@njit(inline="always")
def i64(address, shape):
    """The int64 array of `shape` that starts at `address`."""
    return carray(_i64_pointer(address), shape)


@njit(inline="always")
def u8(address, shape):
    """The uint8 array of `shape` that starts at `address`."""
    return carray(_u8_pointer(address), shape)


@njit(inline="always")
def u16(address, shape):
    """The uint16 array of `shape` that starts at `address`."""
    return carray(_u16_pointer(address), shape)


@njit(inline="always")
def u64(address, shape):
    """The uint64 array of `shape` that starts at `address`."""
    return carray(_u64_pointer(address), shape)


@njit(inline="always")
def f64(address, shape):
    """The float64 array of `shape` that starts at `address`."""
    return carray(_f64_pointer(address), shape)


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
                    self._compiled = cfunc(types.void(types.intp), **options)(self._body)
            self._address = self._compiled.address

    @property
    def was_kept(self) -> bool:
        """Whether it was found on disk rather than compiled."""
        self.prepare()
        return bool(self._compiled.cache_hits)

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
        self._launch(TEAM.control, TEAM.syscall, self._address, threads, *parameters)
