"""Intrinsics for multi-threaded compiled code: atomic words, waiting, calls by address."""

from __future__ import annotations

import ctypes
import platform
import sys

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_WORD = _I64.as_pointer()
_PAUSE: tuple[str, list[ir.Constant]] = ("llvm.x86.sse2.pause", [])
if platform.machine() == "aarch64":
    _PAUSE = ("llvm.aarch64.hint", [ir.IntType(32)(1)])

# System call numbers of futex and sched_yield.
_CALLS = {"x86_64": (202, 24), "aarch64": (98, 124)}
FUTEX, YIELD = _CALLS.get(platform.machine(), (0, 0))
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # the private variants, for threads of one process
SHARED_WAIT, SHARED_WAKE = 0, 1  # for processes that share memory
_CLOCK_MONOTONIC = 1
IS_SUPPORTED = sys.platform == "linux" and FUTEX != 0


def syscall_address() -> int:
    """Address of libc's ``syscall``."""
    return ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0


def clock_address() -> int:
    """Address of libc's ``clock_gettime``, which makes no system call."""
    return ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0


@intrinsic
def add(typing_context, address, value):
    """Add a value to the 64-bit word at an address and return the old value; sequentially
    consistent."""

    def build(context, builder, signature, args):
        place = builder.inttoptr(args[0], _WORD)
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), build


@intrinsic
def exchange(typing_context, address, value):
    """Replace the 64-bit word at an address and return the old value; sequentially consistent."""

    def build(context, builder, signature, args):
        place = builder.inttoptr(args[0], _WORD)
        return builder.atomic_rmw("xchg", place, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), build


@intrinsic
def load(typing_context, address):
    """Read the 64-bit word at an address; sequentially consistent."""

    def build(context, builder, signature, args):
        place = builder.inttoptr(args[0], _WORD)
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(types.intp), build


@intrinsic
def pause(typing_context):
    """Emit the processor's pause instruction, for a spin loop."""

    def build(context, builder, signature, args):
        name, arguments = _PAUSE
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, kind, name)
        builder.call(function, arguments)
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def system_call(typing_context, function, number, first, second, third):
    """Call libc's ``syscall`` with a system call's number and four arguments, the last one 0 (for a
    futex: no timeout)."""

    def build(context, builder, signature, args):
        kind = ir.FunctionType(_I64, [_I64] * 5)
        target = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(target, [*args[1:], _I64(0)])

    return types.int64(*[types.int64] * 5), build


@intrinsic
def timed_wait(typing_context, function, address, seen, timeout):
    """Sleep until another process wakes those that wait at ``address``, unless the 32-bit word
    there differs from ``seen``. timeout: address of a ``timespec``. function: libc's ``syscall``.
    """

    def build(context, builder, signature, args):
        kind = ir.FunctionType(_I64, [_I64] * 5)
        target = builder.inttoptr(args[0], kind.as_pointer())
        call = [_I64(FUTEX), args[1], _I64(SHARED_WAIT), args[2], args[3]]
        return builder.call(target, call)

    return types.int64(*[types.int64] * 4), build


@intrinsic
def monotonic_ns(typing_context, function, room):
    """Nanoseconds of the monotonic clock. function: libc's ``clock_gettime``; room: address of two
    words that it may overwrite."""

    def build(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _I64])
        target = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(target, [ir.IntType(32)(_CLOCK_MONOTONIC), args[1]])
        words = builder.inttoptr(args[1], _WORD)
        seconds = builder.load(words)
        rest = builder.load(builder.gep(words, [ir.IntType(32)(1)]))
        return builder.add(builder.mul(seconds, _I64(1_000_000_000)), rest)

    return types.int64(*[types.int64] * 2), build


@intrinsic
def call_body(typing_context, body, row):
    """Call the compiled function at address ``body`` with ``row``, the address of its
    parameters."""

    def build(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), build


@intrinsic
def lay_out(typing_context, parameters):
    """Store 64-bit words on the caller's stack: an item counter of zero, then the parameters.
    Returns their address."""

    def build(context, builder, signature, args):
        with builder.goto_entry_block():
            row = builder.alloca(ir.ArrayType(_I64, len(parameters) + 1))
        zero = ir.IntType(32)(0)
        builder.store(_I64(0), builder.gep(row, [zero, zero]))
        for i in range(len(parameters)):
            place = builder.gep(row, [zero, ir.IntType(32)(i + 1)])
            builder.store(builder.extract_value(args[0], i), place)
        return builder.ptrtoint(row, _I64)

    return types.intp(parameters), build
