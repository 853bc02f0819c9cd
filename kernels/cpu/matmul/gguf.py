"""Packs the blocks of quantised GGUF tensors into the layout of packed weights, without decoding
them to separate integers first.

A block of a row has 32 or 256 inputs, in one or eight units of 32. A unit's integers are spread
over one or two planes of bits, as in packed weights, so that a plane is packed by moving bits
inside words of four inputs ("quads")."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.atomics import call_body
from kernels.cpu.matmul.blocks import CODE_ZERO, LINE, PANEL, UNIT, BlockWeight
from kernels.cpu.memory import zeros
from kernels.cpu.native import INLINE, Kernel, i8, i32, i64, next_item, u8, u16
from kernels.cpu.threads import num_threads

# How a plane is stored in a block.
_SHORT = 0  # 16 bytes a unit: inputs 0 to 15 in the low, inputs 16 to 31 in the high halves
_RUNS = 1  # runs of 32 bytes; each byte has the bits of one input of several adjacent units
_SIXES = 2  # the low halves of Q6_K: runs of 64 bytes, each of 4 units
_FLAGS = 3  # 4 bytes a unit with one bit for each input
_BYTES = 4  # signed bytes
# How the scales of a block's groups are stored.
_HALVES = 0  # a float16 number at byte 0, and an offset at byte 2 if the type has offsets
_POWER = 1  # the exponent of a power of two
_PAIRS_OF_4 = 2  # Q2_K: scales and offsets of 4 bits
_SPLIT_16 = 3  # Q3_K: 16 signed scales of 6 bits
_SPLIT_8 = 4  # Q4_K, Q5_K: 8 scales and offsets of 6 bits
_SIGNED = 5  # Q6_K: 16 signed bytes
_SPLIT_SIGNED = 6  # IQ4_XS: 8 signed scales of 6 bits


class Plane(NamedTuple):
    """A plane of bits of a unit's integers."""

    width: int  # bits of a value
    how: int
    first: int  # byte of the block


class Blocks(NamedTuple):
    """The layout of one type of tensors."""

    num_bytes: int  # of a block
    planes: tuple[Plane, ...]  # lowest bits first
    scaling: int
    units: int = 1  # of a block
    group_size: int = 32
    zero: int = 0
    has_offsets: bool = False
    outer: int = -1  # byte of the block with the float16 outer scale; that of offsets follows it
    codebook: tuple[int, ...] | None = None  # the numbers that the integers stand for

    @property
    def bits(self) -> int:
        return sum(plane.width for plane in self.planes)


_CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the 4-bit floats
_SCALES = {_POWER: torch.bfloat16, _HALVES: torch.float16}  # of other types: torch.int8

TYPES = {
    "Q4_0": Blocks(18, (Plane(4, _SHORT, 2),), _HALVES, zero=8),
    "Q4_1": Blocks(20, (Plane(4, _SHORT, 4),), _HALVES, has_offsets=True),
    "Q5_0": Blocks(22, (Plane(4, _SHORT, 6), Plane(1, _FLAGS, 2)), _HALVES, zero=16),
    "Q5_1": Blocks(24, (Plane(4, _SHORT, 8), Plane(1, _FLAGS, 4)), _HALVES, has_offsets=True),
    "Q8_0": Blocks(34, (Plane(8, _BYTES, 2),), _HALVES, zero=128),
    "Q2_K": Blocks(84, (Plane(2, _RUNS, 16),), _PAIRS_OF_4, 8, 16, 0, True, 80),
    "Q3_K": Blocks(
        110, (Plane(2, _RUNS, 32), Plane(1, _RUNS, 0)), _SPLIT_16, 8, 16, zero=4, outer=108
    ),
    "Q4_K": Blocks(144, (Plane(4, _RUNS, 16),), _SPLIT_8, 8, 32, 0, True, 0),
    "Q5_K": Blocks(176, (Plane(4, _RUNS, 48), Plane(1, _RUNS, 16)), _SPLIT_8, 8, 32, 0, True, 0),
    "Q6_K": Blocks(
        210, (Plane(4, _SIXES, 0), Plane(2, _RUNS, 128)), _SIGNED, 8, 16, zero=32, outer=208
    ),
    "IQ4_NL": Blocks(18, (Plane(4, _SHORT, 2),), _HALVES, zero=CODE_ZERO, codebook=_CURVE),
    "IQ4_XS": Blocks(
        *(136, (Plane(4, _SHORT, 8),), _SPLIT_SIGNED, 8),
        zero=CODE_ZERO,
        outer=0,
        codebook=_CURVE,
    ),
    "MXFP4": Blocks(17, (Plane(4, _SHORT, 1),), _POWER, zero=CODE_ZERO, codebook=_FLOATS),
}
"""The types of tensors that can be packed."""


def num_inputs(kind: str, row_bytes: int) -> int:
    """Returns the number of inputs in a row of a type in ``TYPES`` from its bytes."""
    form = TYPES[kind]
    return row_bytes // form.num_bytes * form.units * UNIT


def pack_gguf(kind: str, rows: torch.Tensor) -> BlockWeight:
    """Pack the rows of a matrix of a type in ``TYPES``, [N, bytes of a row] uint8, contiguous."""
    form = TYPES[kind]
    num, row_bytes = rows.shape
    blocks, panels = row_bytes // form.num_bytes, -(-num // PANEL)
    units, is_outer = blocks * form.units, form.outer >= 0
    groups = units * UNIT // form.group_size
    inner = _SCALES.get(form.scaling, torch.int8)
    values = zeros((panels, units, form.bits, 2, LINE), torch.uint8)
    scales, offsets = (
        zeros((count, groups, PANEL), inner) for count in (panels, panels * form.has_offsets)
    )
    outer_scales, outer_offsets = (
        torch.zeros((count, blocks, PANEL), dtype=torch.float16)
        for count in (panels * is_outer, panels * (is_outer and form.has_offsets))
    )
    first, *others = form.planes
    second = others[0] if others else None
    tensors = (rows, values, scales, offsets, outer_scales, outer_offsets)
    PACK.run(
        num_threads() if rows.numel() >= _ENOUGH else 1,
        *(tensor.data_ptr() for tensor in tensors),
        num,
        blocks,
        form.num_bytes,
        form.units,
        form.bits * 2 * LINE,
        form.units * UNIT // form.group_size * PANEL * inner.itemsize,
        form.outer,
        scale_function(form.scaling).address,
        plane_function(first.width, first.how).address,
        first.first,
        0 if second is None else plane_function(second.width, second.how).address,
        0 if second is None else second.first,
        first.width * 2 * LINE,
    )
    code = None if form.codebook is None else torch.tensor(form.codebook) + CODE_ZERO
    return BlockWeight(
        values=values,
        scales=scales,
        offsets=offsets if form.has_offsets else None,
        outer_scales=outer_scales.float() if is_outer else None,
        outer_offsets=-outer_offsets.float() if is_outer and form.has_offsets else None,
        codebook=None if code is None else code.byte(),
        order=None,
        bits=form.bits,
        group_size=form.group_size,
        outer_size=form.units * UNIT if is_outer else 0,
        zero=form.zero,
        num_outputs=num,
        num_inputs=units * UNIT,
    )


# Words of a job: one block of each of the outputs of a panel.
_SOURCE = 0  # address of the first output's plane or block
_STRIDE = 1  # bytes from one output to the next
_COUNT = 2  # outputs
_UNITS, _UNIT_BYTES = 3, 4  # units of the block, packed bytes from one to the next
_TARGET = 5  # where the plane is packed to
_SCALES_TO, _OFFSETS_TO = 6, 7  # where scales and offsets are packed to; 0: no offsets
_JOB = 8  # words

_I32 = ir.IntType(32)
_ENOUGH = 1 << 16  # bytes; with fewer, one thread is faster


@intrinsic
def _word(typing_context, address):
    """The 32 bits at an address, loaded by an instruction of its own. Otherwise LLVM gathers the
    words of several outputs in vectors, which takes longer."""

    def build(context, builder, signature, args):
        place = builder.inttoptr(args[0], _I32.as_pointer())
        return builder.sext(builder.load_atomic(place, "unordered", 4), ir.IntType(64))

    return types.int64(types.int64), build


@njit(**INLINE)
def _quad(block, unit, quad, width, how):
    """The bits of a plane of four inputs, each in the low bits of a byte of a word."""
    if how == _SHORT:
        return (_word(block + 16 * unit + 4 * (quad & 3)) >> (quad & 4)) & 0x0F0F0F0F
    if how == _RUNS:
        per = 8 // width
        place = block + 32 * (unit // per) + 4 * quad
        return (_word(place) >> width * (unit % per)) & 0x01010101 * ((1 << width) - 1)
    if how == _SIXES:
        place = block + 64 * (unit >> 2) + 32 * (unit & 1) + 4 * quad
        return (_word(place) >> 2 * (unit & 2)) & 0x0F0F0F0F
    if how == _FLAGS:
        flags = (_word(block + 4 * unit) >> 4 * quad) & 15
        return (flags * 0x00204081) & 0x01010101  # bit i goes to byte i
    return _word(block + 32 * unit + 4 * quad) ^ 0x80808080


@cache
def plane_function(width: int, how: int) -> Kernel:
    """Returns the function that packs one plane of the same block of adjacent outputs, see
    `_pack_body` for its job. One function is compiled for all types that have such a plane."""
    count = 8 // width

    def body(job):
        j = i64(job, (_JOB,))
        units, unit_bytes = j[_UNITS], j[_UNIT_BYTES]
        for output in range(j[_COUNT]):
            block, target = j[_SOURCE] + output * j[_STRIDE], j[_TARGET] + output * 4
            for unit in range(units):
                for line in range(width):
                    word = 0
                    for part in range(count):
                        quad = line + part * width if width == 4 else line * count + part
                        word |= _quad(block, unit, quad, width, how) << part * width
                    i32(target + line * 2 * LINE, (1,))[0] = word
                target += unit_bytes

    return Kernel(body)


@cache
def scale_function(how: int) -> Kernel:
    """Returns the function that packs the scales and offsets of the same block of adjacent outputs,
    see `_pack_body` for its job."""
    size = 2 if how in _SCALES else 1

    def body(job):
        j = i64(job, (_JOB,))
        scales, offsets = j[_SCALES_TO], j[_OFFSETS_TO]
        for output in range(j[_COUNT]):
            block = j[_SOURCE] + output * j[_STRIDE]
            _pack_scales(block, scales + output * size, offsets + output * size, how, offsets)

    return Kernel(body)


@njit(**INLINE)
def _pack_scales(block, scales, offsets, how, has_offsets):
    """Write the scales and offsets of a block's groups, in lines of 32 outputs."""
    if how == _HALVES:
        u16(scales, (1,))[0] = u16(block, (1,))[0]
        if has_offsets:
            u16(offsets, (1,))[0] = u16(block + 2, (1,))[0]
    elif how == _POWER:
        power = np.int64(u8(block, (1,))[0])
        u16(scales, (1,))[0] = 0x20 << power if power < 2 else (power - 1) << 7
    elif how == _SPLIT_8:
        _pack_split(block + 4, scales, offsets)
    else:
        for group in range(8 if how == _SPLIT_SIGNED else 16):
            i8(scales + group * PANEL, (1,))[0] = _scale(block, group, how)
            if how == _PAIRS_OF_4:
                i8(offsets + group * PANEL, (1,))[0] = u8(block, (16,))[group] >> 4


@njit(**INLINE)
def _pack_split(packed, scales, offsets):
    """Write 8 scales and offsets of 6 bits, stored in 12 bytes."""
    data = u8(packed, (12,))
    for group in range(4):
        scale, offset, rest = data[group], data[4 + group], data[8 + group]
        i8(scales + group * PANEL, (1,))[0] = scale & 63
        i8(offsets + group * PANEL, (1,))[0] = offset & 63
        i8(scales + (group + 4) * PANEL, (1,))[0] = rest & 15 | scale >> 2 & 48
        i8(offsets + (group + 4) * PANEL, (1,))[0] = rest >> 4 | offset >> 2 & 48


@njit(**INLINE)
def _scale(block, group, how):
    """The integer scale of a group of a block."""
    data = u8(block, (256,))
    if how == _PAIRS_OF_4:
        return np.int64(data[group] & 15)
    if how == _SIGNED:
        return np.int64(data[192 + group])
    if how == _SPLIT_16:
        low = data[96 + (group & 7)] >> 4 * (group >> 3) & 15
        high = data[104 + (group & 3)] >> 2 * (group >> 2) & 3
    else:
        low = data[4 + (group >> 1)] >> 4 * (group & 1) & 15
        high = data[2 + (group >> 2)] >> 2 * (group & 3) & 3
    return np.int64(low | high << 4) - 32


def _pack_body(row):
    """The kernel; a work item is a panel. For each block of its outputs, it calls the functions
    that pack scales and planes. p: the parameters of `pack_gguf`."""
    p = i64(row, (20,))
    num, blocks, size, units, unit_bytes = p[7], p[8], p[9], p[10], p[11]
    panels = (num + PANEL - 1) // PANEL
    job = np.empty(_JOB, np.int64)
    while True:
        panel = next_item(row)
        if panel >= panels:
            break
        count = min(num - panel * PANEL, PANEL)
        job[_STRIDE], job[_COUNT] = blocks * size, count
        job[_UNITS], job[_UNIT_BYTES] = units, unit_bytes
        for number in range(blocks):
            block, place = p[1] + (panel * PANEL * blocks + number) * size, panel * blocks + number
            job[_SOURCE] = block
            job[_SCALES_TO] = p[3] + place * p[12]
            job[_OFFSETS_TO] = p[4] + place * p[12] if p[4] else 0
            call_body(p[14], job.ctypes.data)
            job[_SOURCE], job[_TARGET] = block + p[16], p[2] + place * units * unit_bytes
            call_body(p[15], job.ctypes.data)
            if p[17]:
                job[_SOURCE], job[_TARGET] = block + p[18], job[_TARGET] + p[19]
                call_body(p[17], job.ctypes.data)
            if p[5]:
                for output in range(count):
                    outer = u16(block + output * blocks * size + p[13], (2,))
                    spot = place * PANEL + output
                    u16(p[5], (spot + 1,))[spot] = outer[0]
                    if p[6]:
                        u16(p[6], (spot + 1,))[spot] = outer[1]


PACK = Kernel(_pack_body, heavy=True)
