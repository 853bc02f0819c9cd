"""Packed weights of 2, 3, 4, 5, 6 or 8 bits in blocks: their layout in memory, packing, unpacking.

The outputs of a matrix are divided into panels of 32, its inputs into units of 32; a quad is four
adjacent inputs. Each 8 bits of a weight's row of 128 bytes belong to one output and one input of a
quad, so that one instruction multiplies four inputs of 16 outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch.nn.functional import pad

from kernels.cpu.memory import zeros
from kernels.quantized import Quantized

PANEL = 32  # outputs of a panel
UNIT = 32  # inputs of a unit
QUAD = 4  # inputs that one instruction multiplies
QUADS = UNIT // QUAD
LINE = 64  # bytes of a quad of 16 outputs
CODE_ZERO = 128  # the stored code of a codebook's zero

# For each number of bits, the planes of a unit as (bits of the plane, position of its lowest bit).
PLANES = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    8: ((8, 0),),
}
_CODEBOOK_BITS = 4
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_PIECE_BYTES = 1 << 22  # values that are packed in one piece


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A packed weight matrix of N outputs and K inputs, P panels, U units and G groups of inputs.

    weight = (value - zero) * scale + offset, where the value is the stored integer, or the byte of
    the codebook with that number. If there are outer scales, a scale is the float32 product of the
    stored scale and the outer scale; offsets and outer offsets likewise."""

    values: torch.Tensor  # [P, U, bits, 2, 64] uint8, planes of bits as `PLANES` lists them
    scales: torch.Tensor  # [P, G, 32] float16, bfloat16 or float32; int8 with outer scales
    offsets: torch.Tensor | None  # [P, G, 32], dtypes as for scales
    outer_scales: torch.Tensor | None  # [P, S, 32] float32
    outer_offsets: torch.Tensor | None  # [P, S, 32] float32
    codebook: torch.Tensor | None  # [16] uint8, values plus 128
    order: torch.Tensor | None  # [K] int32, the input of each column; None: 0, 1, 2, ...
    bits: int
    group_size: int  # 16 or a multiple of 32
    outer_size: int  # inputs that share an outer scale, a multiple of 32; 0: none do
    zero: int
    num_outputs: int
    num_inputs: int

    @property
    def units(self) -> int:
        return self.values.shape[1]

    @property
    def halves(self) -> int:
        """The number of groups of a unit: 2 if groups have 16 inputs, else 1."""
        return 2 if self.group_size < UNIT else 1

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (one for one in vars(self).values() if isinstance(one, torch.Tensor))
        return sum(one.nbytes for one in tensors)


def can_pack_blocks(matrix: Quantized) -> bool:
    """True if `pack_blocks` supports the matrix: integer values in groups of 16 inputs or of a
    multiple of 32, equally large except for the last, and scales of a known dtype."""
    if matrix.is_float or matrix.bits not in PLANES:
        return False
    if matrix.codebook is not None and matrix.bits != _CODEBOOK_BITS:
        return False
    return _has_whole_groups(matrix) and _has_known_scales(matrix)


def _has_whole_groups(matrix: Quantized) -> bool:
    """True if each unit of 32 columns is in one group, or in two groups of 16."""
    num_in, num_groups = matrix.values.shape[1], matrix.scales.shape[1]
    size = matrix.group_size
    if num_groups == 1 and matrix.groups is None and size >= num_in:
        return True
    if num_groups != -(-num_in // max(size, 1)) or (size != UNIT // 2 and size % UNIT):
        return False
    if matrix.groups is None:
        return True
    return torch.equal(matrix.groups.sort().values, torch.arange(num_in) // size)


def _has_known_scales(matrix: Quantized) -> bool:
    """True if scales and offsets have a dtype that kernels can decode."""
    pairs = [(matrix.scales, matrix.outer_scales)]
    if matrix.offsets is not None:
        pairs.append((matrix.offsets, matrix.outer_offsets))
    for inner, outer in pairs:
        if outer is None and not inner.is_floating_point():
            return False
        if outer is not None and inner.dtype is not torch.int8:
            return False
    if matrix.outer_scales is None and matrix.outer_offsets is None:
        return True
    size = matrix.outer_size
    return matrix.groups is None and size > 0 and size % UNIT == 0 and size % matrix.group_size == 0


class BlockWriter:
    """Packs a matrix that is given in pieces of rows, without a second copy of it in memory.

    like: a matrix with the same bits, group size, dtypes and optional parts as every piece, for
    which `can_pack_blocks` is true; num_out: the number of outputs of the whole matrix. A matrix
    with zero points gets float32 offsets instead of them."""

    def __init__(self, like: Quantized, num_out: int) -> None:
        num_in = like.values.shape[1]
        panels, units = -(-num_out // PANEL), -(-num_in // UNIT)
        size = like.group_size if like.scales.shape[1] > 1 else units * UNIT
        groups = units * UNIT // size if size < UNIT else -(-num_in // size)
        self._columns = None if like.groups is None else like.groups.argsort(stable=True)

        def empty(tensor: torch.Tensor | None, count: int) -> torch.Tensor | None:
            if tensor is None:
                return None
            return zeros((panels, count, PANEL), _kept_dtype(tensor.dtype))

        supers = 0 if not like.outer_size else -(-num_in // like.outer_size)
        scales = empty(like.scales, groups)
        assert scales is not None
        mixed = torch.empty(0) if like.zeros is not None else None
        self.weight = BlockWeight(
            values=zeros((panels, units, like.bits, 2, LINE), torch.uint8),
            scales=scales,
            offsets=empty(like.offsets if mixed is None else mixed, groups),
            outer_scales=empty(like.outer_scales, supers),
            outer_offsets=empty(like.outer_offsets, supers),
            codebook=None if like.codebook is None else (like.codebook + CODE_ZERO).byte(),
            order=None if self._columns is None else self._columns.int(),
            bits=like.bits,
            group_size=size,
            outer_size=like.outer_size,
            zero=_zero_of(like),
            num_outputs=num_out,
            num_inputs=num_in,
        )

    def write(self, first: int, piece: Quantized) -> None:
        """Pack the rows of ``piece`` as outputs ``first``, ``first`` + 1, and so on. ``first`` must
        be a multiple of 32, and so must the number of rows of every piece but the last."""
        per = max(1, _PIECE_BYTES // (self.weight.units * UNIT * PANEL)) * PANEL
        for start in range(0, len(piece.values), per):
            self._write_panels((first + start) // PANEL, _rows(piece, slice(start, start + per)))

    def _write_panels(self, panel: int, piece: Quantized) -> None:
        weight = self.weight
        values = piece.values if self._columns is None else piece.values[:, self._columns]
        panels = slice(panel, panel + -(-len(values) // PANEL))
        _pack_values(values, weight.values[panels])
        pairs = (
            (piece.scales, weight.scales),
            (_offsets_of(piece), weight.offsets),
            (piece.outer_scales, weight.outer_scales),
            (piece.outer_offsets, weight.outer_offsets),
        )
        for source, target in pairs:
            if source is not None and target is not None:
                _pack_groups(source, target[panels])


def pack_blocks(matrix: Quantized) -> BlockWeight:
    """Pack a matrix for which `can_pack_blocks` is true."""
    if matrix.zeros is not None and bool((matrix.zeros == 1 << matrix.bits - 1).all()):
        matrix = matrix._replace(zeros=None)  # the default, for which no offsets are needed
    writer = BlockWriter(matrix, len(matrix.values))
    writer.write(0, matrix)
    return writer.weight


def unpack(weight: BlockWeight) -> Quantized:
    """Undo `pack_blocks`: the same matrix, with its inputs in their original order. Zero points
    that differ come back as offsets, and a single group is as large as the inputs."""
    values = unpack_values(weight.values, weight.bits)[: weight.num_outputs, : weight.num_inputs]
    groups, num_groups = None, -(-weight.num_inputs // weight.group_size)
    if weight.order is not None:
        back = weight.order.long().argsort()
        values, groups = values[:, back], back // weight.group_size

    def rows(tensor: torch.Tensor | None, count: int) -> torch.Tensor | None:
        if tensor is None:
            return None
        return tensor.transpose(1, 2).flatten(0, 1)[: weight.num_outputs, :count].contiguous()

    scales = rows(weight.scales, num_groups)
    assert scales is not None
    supers = -(-weight.num_inputs // max(weight.outer_size, 1))
    return Quantized(
        values=values.contiguous(),
        scales=scales,
        bits=weight.bits,
        group_size=weight.group_size if num_groups > 1 else weight.num_inputs,
        groups=groups,
        offsets=rows(weight.offsets, num_groups),
        codebook=None if weight.codebook is None else weight.codebook.short() - CODE_ZERO,
        outer_scales=rows(weight.outer_scales, supers),
        outer_offsets=rows(weight.outer_offsets, supers),
        outer_size=weight.outer_size,
    )


def unpack_values(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the integers [P * 32, U * 32] uint8 of packed values [P, U, bits, 2, 64]."""
    panels, units = packed.shape[:2]
    quads = packed.new_zeros((panels, units, QUADS, 2, LINE))
    for row, shift, parts in _rows_of(bits):
        for position, quad, mask in parts:
            quads[:, :, quad] |= (packed[:, :, row] >> position & mask) << shift
    each = quads.view(panels, units, QUADS, 2, LINE // QUAD, QUAD)
    return each.permute(0, 3, 4, 1, 2, 5).reshape(panels * PANEL, units * UNIT)


def _pack_values(values: torch.Tensor, packed: torch.Tensor) -> None:
    """Fill packed [P, U, bits, 2, 64] with the integers values [rows, inputs]."""
    panels, units, bits = packed.shape[:3]
    missing = (0, units * UNIT - values.shape[1], 0, panels * PANEL - len(values))
    if any(missing):
        values = pad(values, missing)
    each = values.reshape(panels, 2, LINE // QUAD, units, QUADS, QUAD)
    quads = each.permute(0, 3, 4, 1, 2, 5).reshape(panels, units, QUADS, 2, LINE)
    for row, shift, parts in _rows_of(bits):
        target = packed[:, :, row]
        for number, (position, quad, mask) in enumerate(parts):
            part = (quads[:, :, quad] >> shift & mask) << position
            target.bitwise_or_(part) if number else target.copy_(part)


def _rows_of(bits: int) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Yield each row of a unit: its number, the position of its plane's lowest bit in a value, and
    the parts of its bytes as (position in the byte, number of the quad, mask)."""
    first = 0
    for width, shift in PLANES[bits]:
        for row, parts in row_parts(width):
            yield first + row, shift, [(at, quad, (1 << width) - 1) for at, quad in parts]
        first += width


def row_parts(width: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns, for each row of a plane of `width` bits, its number and the quads that its bytes
    store, as (position of the lowest bit, number of the quad)."""
    count = 8 // width  # quads of a row
    rows: list[tuple[int, list[tuple[int, int]]]] = [(row, []) for row in range(width)]
    for row, part in product(range(width), range(count)):
        quad = row + part * width if width == 4 else row * count + part
        rows[row][1].append((part * width, quad))
    return rows


def _pack_groups(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fill target [P, G, 32] with the scales or offsets source [rows, groups]."""
    missing = len(target) * PANEL - len(source)
    if missing:
        source = pad(source.to(target.dtype), (0, 0, 0, missing))
    by_panel = source.view(len(target), PANEL, -1).transpose(1, 2)
    target[:, : by_panel.shape[1]].copy_(by_panel)


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which scales are stored: their own, or one that holds them exactly."""
    if dtype in _SCALES or dtype is torch.int8:
        return dtype
    return torch.float32 if dtype.itemsize > 1 else torch.bfloat16


def _zero_of(matrix: Quantized) -> int:
    """Returns the zero point that is subtracted from the packed values."""
    if matrix.codebook is not None:
        return CODE_ZERO
    return 0 if matrix.zeros is not None else matrix.zero


def _offsets_of(matrix: Quantized) -> torch.Tensor | None:
    """Returns the offsets [N, G] of a matrix, float32 if they stand for zero points."""
    if matrix.zeros is None:
        return matrix.offsets
    scales = matrix.scales.float()
    if matrix.outer_scales is not None:
        per = matrix.outer_size // matrix.group_size
        scales = scales * matrix.outer_scales.repeat_interleave(per, 1)[:, : scales.shape[1]]
    return -(matrix.zeros.float() * scales)


def _rows(matrix: Quantized, rows: slice) -> Quantized:
    """Returns the matrix of some outputs."""

    def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[rows]

    return matrix._replace(
        values=matrix.values[rows],
        scales=matrix.scales[rows],
        zeros=of(matrix.zeros),
        offsets=of(matrix.offsets),
        outer_scales=of(matrix.outer_scales),
        outer_offsets=of(matrix.outer_offsets),
    )
