"""Compiled loops ("kernels") that get addresses instead of arrays.

A *body* is a Python function, compiled by Numba to machine code. Its only argument is the address
of an array of 64-bit parameters. Every thread of the team runs it and takes work items from an
atomic counter in parameter 0, so a slow thread takes fewer items. A call costs about a microsecond,
and each body is compiled once for all shapes.

Numba's parallel loops are not used, because they bring a second OpenMP runtime besides torch's, and
two sets of spinning threads cost more than the loops gain.
"""

from __future__ import annotations

import gc
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

from kernels.cpu.disk_cache import cache_of_these_sources, compiled_once, is_kept
from kernels.cpu.team import TEAM, launch, launch_all, launch_nogil

# Fast math without "no NaNs" and "no infinities", so that values that are not finite stay so.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}

# Options of functions that only compiled code calls; they get no Python wrapper.
INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INLINE = {**INNER, "fastmath": FAST, "error_model": "numpy", "forceinline": True}
# Each operation is rounded as it is written, so that bodies with the same formula are
# bit-identical. (Options not given here would be those of the calling function.)
EXACT = {**INLINE, "fastmath": False}

_I64 = ir.IntType(64)
_SIGNATURE = types.void(types.intp)


def _array_at(dtype: types.Type) -> Callable[..., Any]:
    """Make the intrinsic ``array(address, shape)``, which gives compiled code an array at an
    address."""
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


# The contiguous array of `shape` (a tuple) at an address.
f32, f64 = _array_at(types.float32), _array_at(types.float64)
i8, i32, i64 = _array_at(types.int8), _array_at(types.int32), _array_at(types.int64)
u8, u16 = _array_at(types.uint8), _array_at(types.uint16)
u32, u64 = _array_at(types.uint32), _array_at(types.uint64)


@intrinsic
def unowned(typing_context, arrays):
    """A tuple of arrays, without their reference counts, whose updates cost as much as short loops
    over rows. The arrays must live until all use of the result is over: pass them to `keep` then.
    """

    def build(context, builder, signature, args):
        made = []
        for place, kind in enumerate(arrays):
            given = make_array(kind)(context, builder, builder.extract_value(args[0], place))
            array = make_array(kind)(context, builder)
            extents, strides = (
                cgutils.unpack_tuple(builder, each) for each in (given.shape, given.strides)
            )
            populate_array(array, given.data, extents, strides, given.itemsize, meminfo=None)
            made.append(array._getvalue())
        return context.make_tuple(builder, arrays, made)

    return arrays(arrays), build


@intrinsic
def keep(typing_context, arrays):
    """Keep a tuple of arrays in memory until here; Numba frees an array after its last use."""

    def build(context, builder, signature, args):
        return context.get_dummy_value()

    return types.void(arrays), build


@intrinsic
def next_item(typing_context, counter):
    """Increment the work item counter at the address ``counter`` and return its old value."""

    def build(context, builder, signature, args):
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, _I64(1), "acq_rel")

    return types.int64(types.intp), build


@intrinsic
def float_of_bits(typing_context, bits):
    """Returns the float32 that has these 32 bits."""

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
    """Returns a float's bits as an integer parameter, which bodies read with :func:`f64`."""
    return struct.unpack("q", struct.pack("d", value))[0]


def _nothing() -> None:
    pass


# Parameters are padded to one of two numbers, because the launcher is compiled for each number.
_NUMBERS = (12, 20)
_FILLED_UP = [
    (0,) * (next(number for number in _NUMBERS if number >= given) - given)
    for given in range(_NUMBERS[-1] + 1)
]


def prepare_launches() -> None:
    """Compile the functions that start kernel bodies, or load them from the disk cache."""
    with _without_collections():
        for number in _NUMBERS:
            for launched in (launch, launch_nogil):
                launched.compile((types.int64,) * 4 + (types.UniTuple(types.int64, number),))
        launch_all.compile((types.int64,) * 4)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Context without garbage collection, which takes a fifth of the time of a compilation."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class NativeLaunch(NamedTuple):
    """A recorded launch of a kernel body, with all that is needed to repeat it."""

    body: int
    threads: int
    parameters: tuple[int, ...]


class Notes(list[NativeLaunch]):
    """Recorded launches. ``held``: what must live as long as they may be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[object] = []


_NOTES: dict[int, Notes] = {}  # by thread id


@contextmanager
def noted() -> Iterator[Notes]:
    """Context that yields a list, to which this thread's launches of kernel bodies are appended."""
    thread = threading.get_ident()
    notes = _NOTES[thread] = Notes()
    try:
        yield notes
    finally:
        del _NOTES[thread]


def hold(*tensors: object) -> None:
    """Let tensors that are made and dropped between launches live as long as their recording, if
    this thread's launches are being recorded."""
    if _NOTES and (notes := _NOTES.get(threading.get_ident())) is not None:
        notes.held += tensors


def is_recorded() -> bool:
    """True if this thread's launches are being recorded."""
    return threading.get_ident() in _NOTES


class Kernel:
    """A function (its body) that is compiled at its first run and stored in Numba's disk cache.

    heavy: release the GIL during a run, which pays off above some tens of microseconds. exact:
    round each operation of the body as it is written, like functions with the options EXACT.
    """

    def __init__(
        self, body: Callable[[int], None], *, heavy: bool = False, exact: bool = False
    ) -> None:
        self._body = body
        self._fast = set() if exact else FAST
        self._launch = launch_nogil if heavy else launch
        self._first: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._compiled: Any = None
        self._address = 0

    def prepare(self, *, waits: bool = True) -> bool:
        """Compile the body or load it from the disk cache. The first call in a process also loads
        Numba. Returns False if another process compiles it and ``waits`` is false."""
        if self._address:
            return True
        self._first()
        with self._lock:
            if self._compiled is None:
                with compiled_once(self._body, _SIGNATURE, waits=waits) as is_mine:
                    if not is_mine:
                        return False
                    self._compile()
            self._address = self._compiled.address
        return True

    def _compile(self) -> None:
        with cache_of_these_sources() as is_writable, _without_collections():
            options = {"cache": is_writable, "fastmath": self._fast, "error_model": "numpy"}
            self._compiled = cfunc(_SIGNATURE, **options)(self._body)

    @property
    def is_kept(self) -> bool:
        """True if the body is in the disk cache or is already compiled in this process."""
        return self._compiled is not None or is_kept(self._body, _SIGNATURE)

    def compile_after(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` before the body is compiled or loaded, since another process may be
        compiling it."""
        self._first = wait

    @property
    def address(self) -> int:
        """Address of the compiled body, for kernels that call it with `atomics.call_body`."""
        if not self._address:
            self.prepare()
        return self._address

    def assembly(self) -> str:
        """The machine code as text, for inspection."""
        self.prepare()
        text: str = self._compiled._library.get_asm_str()
        return text

    def run(self, threads: int, *parameters: int) -> None:
        """Run the body with up to ``threads`` threads. Its array of parameters has the item counter
        at index 0, and ``parameters`` from index 1 on."""
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
