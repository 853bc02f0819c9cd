"""Compiled loops on torch's own OpenMP team.

A *body* is a Python function of one argument, the address of a row of 64-bit parameters, compiled
by Numba to machine code. Every thread of the team runs it and takes work items from an atomic
counter in parameter 0, so a thread that the machine slows down takes fewer. Addresses instead of
arrays keep a call at about a microsecond and each body at one compilation for all shapes.

Numba's own parallel loops are not used: they bring a second OpenMP runtime and a second set of
threads, and two sets that spin for each other's cores cost more than the loops save.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic

# All of fast math but "no NaNs" and "no infinities": what is not finite must come out not finite.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}

_I32, _I64 = ir.IntType(32), ir.IntType(64)


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
def _run(typing_context, fork, body, threads, parameters):
    """Lay the parameters out on the stack behind a zero counter and run the body on the team."""

    def build(context, builder, signature, args):
        fork, body, threads, values = args
        with builder.goto_entry_block():
            row = builder.alloca(ir.ArrayType(_I64, len(parameters) + 1))
        builder.store(_I64(0), builder.gep(row, [_I32(0), _I32(0)]))
        for i in range(len(parameters)):
            value = builder.extract_value(values, i)
            builder.store(value, builder.gep(row, [_I32(0), _I32(i + 1)]))
        address = builder.ptrtoint(row, _I64)
        alone = builder.icmp_signed("<=", threads, _I64(1))
        with builder.if_else(alone) as (then, otherwise):
            with then:
                kind = ir.FunctionType(ir.VoidType(), [_I64])
                builder.call(builder.inttoptr(body, kind.as_pointer()), [address])
            with otherwise:
                kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
                team = builder.inttoptr(fork, kind.as_pointer())
                builder.call(team, [body, address, builder.trunc(threads, _I32), _I32(0)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64, parameters), build


@njit(cache=True)
def _launch(fork, body, threads, *parameters):
    _run(fork, body, threads, parameters)


@njit(cache=True, nogil=True)
def _launch_nogil(fork, body, threads, *parameters):
    _run(fork, body, threads, parameters)


def _find_fork() -> int:
    """Address of GOMP_parallel in the OpenMP runtime torch has loaded; 0: none, run alone."""
    torch.get_num_threads()
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return 0
    for path in dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps.splitlines()):
        if os.path.basename(path).startswith(("libgomp", "libiomp5", "libomp")):
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            if hasattr(runtime, "GOMP_parallel"):
                return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


_FORK = _find_fork()


@cache
def _cache_directory() -> str | None:
    """Where compiled bodies are kept: beside the sources, else in the user's cache, if writable.

    Named after the text of all sources: Numba looks only at the file a body stands in, and would
    miss a change in what the body calls.
    """
    here = Path(__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))
    name = "numba-" + hashlib.sha256(text).hexdigest()[:16]
    for parent in (here / "__pycache__", Path.home() / ".cache" / "metronome"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    return None


@contextmanager
def _cache_of_these_sources() -> Iterator[bool]:
    """Numba reads its cache directory when a function is handed over, not when it is compiled."""
    chosen = config.CACHE_DIR or _cache_directory()
    before, config.CACHE_DIR = config.CACHE_DIR, chosen or ""
    try:
        yield chosen is not None
    finally:
        config.CACHE_DIR = before


@lru_cache(maxsize=256)
def bits(value: float) -> int:
    """A float as the parameter a body reads back through :func:`f64`."""
    return struct.unpack("q", struct.pack("d", value))[0]


class Kernel:
    """A body, compiled when first run and kept in Numba's cache on disk.

    heavy: let other Python threads run meanwhile; worth it from some tens of microseconds.
    """

    def __init__(self, body: Callable[[int], None], *, heavy: bool = False) -> None:
        self._body = body
        self._launch = _launch_nogil if heavy else _launch

    @cached_property
    def _compiled(self) -> Any:
        with _cache_of_these_sources() as is_writable:
            options = {"cache": is_writable, "fastmath": FAST, "error_model": "numpy"}
            return cfunc(types.void(types.intp), **options)(self._body)

    @cached_property
    def _address(self) -> int:
        return self._compiled.address

    def prepare(self) -> None:
        """Compile now, or load from the cache; the first of a process also starts Numba."""
        _ = self._address

    def run(self, threads: int, *parameters: int) -> None:
        """Parameter i is at index i + 1 of the body's row."""
        self._launch(_FORK, self._address, threads if _FORK else 1, *parameters)
