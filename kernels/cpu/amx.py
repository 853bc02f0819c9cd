"""AMX tiles as Numba intrinsics: eight registers of 16 rows x 64 bytes, and their product.

A tile's number is a literal. If the literal `soft` is true, the operations are emulated, so that
code on tiles can be tested on any processor: slowly, but bit for bit as Intel's manual defines
TDPBF16PS (except for denormal numbers, which the instruction treats as zero) and TDPBUSD.

`state` is the address of STATE bytes that belong to the thread. A thread calls `begin` before its
first tile operation and `end` after its last; in between, context switches save the tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.native import f32, float_of_bits, i32, u8, u16
from kernels.cpu.vectors import in_order

ROWS = 16  # rows of a tile
ROW_BYTES = 64
_CONFIGURATION = 8 * ROWS * ROW_BYTES  # its offset after emulated tiles, which AMX does not need
STATE = _CONFIGURATION + ROW_BYTES

_PALETTE, _COLUMNS_AT, _ROWS_AT = 1, 16, 48  # offsets in the configuration
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_HALF = np.int32(16)
_ZERO = np.float32(0)
_FLOATS = ROW_BYTES // 4
_TILE = ROWS * ROW_BYTES


def _operation(soft_body: Any, given: tuple[Any, ...], literals: tuple[Any, ...], emit: Any) -> Any:
    """Return the signature and the code generator of a tile operation. given: types of all
    arguments, of which those in `literals` must be literals; the last argument is `soft`. If it is
    true, `soft_body` is called, otherwise emit(builder, args) generates AMX instructions."""
    if not all(isinstance(one, types.Literal) for one in literals):
        return None
    is_soft = literals[-1].literal_value
    kinds = [one if isinstance(one, types.Literal) else types.intp for one in given]

    def build(context, builder, signature, args):
        if is_soft:
            plain = types.void(*[types.intp] * (len(args) - 1))
            numbers = [
                _I64(kind.literal_value) if isinstance(kind, types.Literal) else arg
                for kind, arg in zip(kinds, args, strict=True)
            ]
            context.compile_internal(builder, soft_body, plain, numbers[:-1])
        else:
            emit(builder, args)
        return context.get_dummy_value()

    return types.void(*kinds), build


def _call(builder, name, *args):
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        function = ir.Function(builder.module, kind, name)
    builder.call(function, args)


def _number(literal):
    return ir.Constant(_I8, literal.literal_value)


def _pointer(builder, address):
    return builder.inttoptr(address, _I8.as_pointer())


@intrinsic(prefer_literal=True)
def _configure(typing_context, state, soft):
    def emit(builder, args):
        _call(builder, "llvm.x86.ldtilecfg", _pointer(builder, args[0]))

    return _operation(_nothing, (state, soft), (soft,), emit)


@intrinsic(prefer_literal=True)
def end(typing_context, state, soft):
    """Release the tiles, so that context switches of this thread are fast again."""

    def emit(builder, args):
        _call(builder, "llvm.x86.tilerelease")

    return _operation(_nothing, (state, soft), (soft,), emit)


@intrinsic(prefer_literal=True)
def zero(typing_context, state, tile, soft):
    """Set all 16 rows of a tile to zero."""

    def emit(builder, args):
        _call(builder, "llvm.x86.tilezero", _number(tile))

    return _operation(_soft_zero, (state, tile, soft), (tile, soft), emit)


@intrinsic(prefer_literal=True)
def load(typing_context, state, tile, address, stride, soft):
    """Load a tile: each row is read, usually as 64 bytes, from address + row * stride."""

    def emit(builder, args):
        name = "llvm.x86.tileloadd64"
        _call(builder, name, _number(tile), _pointer(builder, args[2]), args[3])

    return _operation(_soft_load, (state, tile, address, stride, soft), (tile, soft), emit)


@intrinsic(prefer_literal=True)
def load_once(typing_context, state, tile, address, stride, soft):
    """Load a tile like `load`, but without evicting other data from the cache."""

    def emit(builder, args):
        name = "llvm.x86.tileloaddt164"
        _call(builder, name, _number(tile), _pointer(builder, args[2]), args[3])

    return _operation(_soft_load, (state, tile, address, stride, soft), (tile, soft), emit)


@intrinsic(prefer_literal=True)
def store(typing_context, state, tile, address, stride, soft):
    """Store a tile: each row is written as 64 bytes to address + row * stride."""

    def emit(builder, args):
        name = "llvm.x86.tilestored64"
        _call(builder, name, _number(tile), _pointer(builder, args[2]), args[3])

    return _operation(_soft_store, (state, tile, address, stride, soft), (tile, soft), emit)


@intrinsic(prefer_literal=True)
def dot(typing_context, state, total, left, right, soft):
    """Multiply tiles: total [16, 16] float32 += left [16, 32] @ right [16 pairs, 16, 2], both
    bfloat16."""
    numbers = (total, left, right)

    def emit(builder, args):
        _call(builder, "llvm.x86.tdpbf16ps", *map(_number, numbers))

    return _operation(_soft_dot, (state, *numbers, soft), (*numbers, soft), emit)


@intrinsic(prefer_literal=True)
def dot_unsigned_signed(typing_context, state, total, left, right, soft):
    """Multiply tiles: total [16, 16] int32 += left [16, 64] @ right [16 quads, 16, 4], unsigned and
    signed bytes."""
    numbers = (total, left, right)

    def emit(builder, args):
        _call(builder, "llvm.x86.tdpbusd", *map(_number, numbers))

    return _operation(_soft_unsigned_signed, (state, *numbers, soft), (*numbers, soft), emit)


@njit(inline="always")
def begin(state, soft):
    """Configure all tiles of this thread with 16 rows x 64 bytes. soft: a literal, true to emulate
    tiles."""
    begin_deep(state, ROW_BYTES, soft)


@njit(inline="always")
def begin_deep(state, depth, soft):
    """Configure tiles for products of `depth` bytes, at most 64: tiles 0 to 3 (sums) have 16 rows x
    64 bytes, 4 and 5 (left) 16 rows x `depth` bytes, 6 and 7 (right) depth / 4 rows x 64 bytes."""
    settings = u8(state + _CONFIGURATION, (ROW_BYTES,))
    for i in range(ROW_BYTES):
        settings[i] = 0
    settings[0] = _PALETTE
    for tile in range(8):
        settings[_COLUMNS_AT + 2 * tile] = depth if 4 <= tile < 6 else ROW_BYTES
        settings[_ROWS_AT + tile] = depth // 4 if tile >= 6 else ROWS
    _configure(state + _CONFIGURATION, soft)


def _nothing(state):
    pass


def _soft_zero(state, tile):
    sums = f32(state + tile * _TILE, (ROWS * _FLOATS,))
    for i in range(ROWS * _FLOATS):
        sums[i] = _ZERO


def _soft_load(state, tile, address, stride):
    settings = u8(state + _CONFIGURATION, (ROW_BYTES,))
    rows, columns = settings[_ROWS_AT + tile], settings[_COLUMNS_AT + 2 * tile]
    target = u8(state + tile * _TILE, (ROWS, ROW_BYTES))
    for row in range(ROWS):
        source = u8(address + row * stride, (ROW_BYTES,))
        for i in range(ROW_BYTES):
            if row < rows and i < columns:
                target[row, i] = source[i]
            else:
                target[row, i] = 0


def _soft_store(state, tile, address, stride):
    for row in range(ROWS):
        source, target = (
            u8(state + tile * _TILE + row * 64, (64,)),
            u8(address + row * stride, (64,)),
        )
        for i in range(ROW_BYTES):
            target[i] = source[i]


def _soft_dot(state, total, left, right):
    sums = f32(state + total * _TILE, (ROWS, _FLOATS))
    a = u16(state + left * _TILE, (ROWS, _FLOATS, 2))
    b = u16(state + right * _TILE, (_FLOATS, _FLOATS, 2))
    for m in range(ROWS):
        for n in range(_FLOATS):
            even, odd = _ZERO, _ZERO
            for k in range(_FLOATS):
                even = _fused(_wide(a[m, k, 0]), _wide(b[k, n, 0]), even)
                odd = _fused(_wide(a[m, k, 1]), _wide(b[k, n, 1]), odd)
            sums[m, n] = in_order(sums[m, n] + in_order(in_order(even) + in_order(odd)))


def _soft_unsigned_signed(state, total, left, right):
    sums = i32(state + total * _TILE, (ROWS, _FLOATS))
    a = u8(state + left * _TILE, (ROWS, _FLOATS, 4))
    b = u8(state + right * _TILE, (_FLOATS, _FLOATS, 4))
    for m in range(ROWS):
        for n in range(_FLOATS):
            for k in range(_FLOATS):
                for i in range(4):
                    other = (np.int32(b[k, n, i]) ^ 128) - 128
                    sums[m, n] += np.int32(np.int32(a[m, k, i]) * other)


class Emitter(NamedTuple):
    """Emits tile operations inside another intrinsic. state: address of the thread's tiles; soft:
    emulate them. Tiles are numbers, addresses and strides are LLVM values."""

    context: Any
    builder: Any
    state: Any
    soft: bool

    def zero(self, tile: int) -> None:
        self._emit("tilezero", _soft_zero, (tile,))

    def load(self, tile: int, address: Any, stride: Any) -> None:
        self._emit("tileloadd64", _soft_load, (tile,), address, stride)

    def load_once(self, tile: int, address: Any, stride: Any) -> None:
        self._emit("tileloaddt164", _soft_load, (tile,), address, stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        self._emit("tilestored64", _soft_store, (tile,), address, stride)

    def dot(self, total: int, left: int, right: int) -> None:
        self._emit("tdpbf16ps", _soft_dot, (total, left, right))

    def _emit(self, name: str, soft_body: Any, tiles: tuple[int, ...], *place: Any) -> None:
        if self.soft:
            args = [self.state, *map(_I64, tiles), *place]
            kind = types.void(*[types.intp] * len(args))
            self.context.compile_internal(self.builder, soft_body, kind, args)
            return
        address = [_pointer(self.builder, one) for one in place[:1]]
        numbers = [ir.Constant(_I8, tile) for tile in tiles]
        _call(self.builder, f"llvm.x86.{name}", *numbers, *address, *place[1:])


@njit(inline="always")
def _wide(bits):
    return float_of_bits(np.int32(bits) << _HALF)


@intrinsic
def _fused(typing_context, a, b, c):
    """Fused a * b + c, rounded once."""

    def build(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), build
