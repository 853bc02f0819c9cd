"""Weights of checkpoints on the CPU, plain or quantised, from which linear layers are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.cpu.matmul import gguf
from kernels.cpu.matmul.blocks import BlockWeight, unpack
from kernels.pages import allocate
from kernels.quantized import Quantized
from kernels.reference.quant import dequantize, zeros_of

PIECE_ELEMENTS = 1 << 22  # dequantised at once


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A quantised matrix [out, in]. ``dtype``: type of the numbers before quantisation."""

    matrix: Quantized
    dtype: torch.dtype
    quantizes_inputs: bool = False
    """True if the product may also quantise its inputs: to 8-bit floats if the matrix has floats,
    otherwise to 8-bit integers."""
    input_scale: float | None = None
    """Calibrated scale of quantised inputs; ``None``: a scale is computed for each row."""

    @property
    def shape(self) -> torch.Size:
        return self.matrix.values.shape

    @property
    def multiplies_bytes(self) -> bool:
        """True if inputs are multiplied as 8-bit integers by 8-bit integers with one scale per
        output."""
        m = self.matrix
        has_more = any(part is not None for part in (m.zeros, m.offsets, m.codebook, m.groups))
        is_by_output = m.bits == 8 and m.scales.shape[1] == 1 and not m.outer_size
        return self.quantizes_inputs and not m.is_float and is_by_output and not has_more

    def rows(self, first: int, count: int) -> QuantizedWeight:
        """Return the matrix of ``count`` outputs from ``first`` on, without a copy."""
        return replace(self, matrix=self.matrix.of_outputs(slice(first, first + count)))

    def dequantize(self) -> torch.Tensor:
        """Return the matrix [out, in], dequantised to ``dtype``."""
        return dequantize(self.matrix, self.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class GgufWeight:
    """A quantised matrix [out, in] in the bytes of a GGUF file."""

    rows: torch.Tensor
    """The rows, [out, bytes of a row] uint8, contiguous."""
    kind: str
    """The name of the tensor type, a key of ``kernels.cpu.matmul.gguf.TYPES``."""
    dtype: torch.dtype
    """The dtype of the dequantised matrix."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), gguf.num_inputs(self.kind, self.rows.shape[1])))

    def blocks(self) -> BlockWeight:
        """Return the matrix in the layout of the CPU's kernels."""
        return gguf.pack_gguf(self.kind, self.rows)

    def quantized(self) -> QuantizedWeight:
        """Return the matrix with its integers and scales as separate tensors."""
        return QuantizedWeight(matrix=unpack(self.blocks()), dtype=self.dtype)

    def dequantize(self) -> torch.Tensor:
        """Return the matrix [out, in], dequantised to ``dtype``."""
        out = torch.empty(self.shape, dtype=self.dtype)
        at_once = max(1, PIECE_ELEMENTS // out.shape[1])
        for first in range(0, len(out), at_once):
            piece = replace(self, rows=self.rows[first : first + at_once])
            out[first : first + at_once] = piece.quantized().dequantize()
        return out


StoredWeight = torch.Tensor | QuantizedWeight | GgufWeight
"""A weight that is stored in one way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitWeight:
    """A matrix [out, in] whose outputs are divided into parts that are stored in different ways."""

    parts: tuple[StoredWeight, ...]
    """The parts in the order of their outputs, at least two."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def dequantize(self) -> torch.Tensor:
        """Return the matrix [out, in], dequantised to ``dtype``."""
        return torch.cat([plain(part) for part in self.parts])


Weight = StoredWeight | SplitWeight


def plain(weight: Weight) -> torch.Tensor:
    """The weight as a plain tensor, dequantised if necessary."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def scale_rows(weight: Weight, factors: torch.Tensor) -> Weight:
    """Multiply each row of a weight [out, in] by its factor, [out] float32; a plain weight is
    changed in place. The scales of a quantised weight become float32."""
    if not isinstance(weight, SplitWeight):
        return _scaled(weight, factors)
    pieces = torch.split(factors, [part.shape[0] for part in weight.parts])
    pairs = zip(weight.parts, pieces, strict=True)
    return replace(weight, parts=tuple(_scaled(*pair) for pair in pairs))


def _scaled(weight: StoredWeight, factors: torch.Tensor) -> StoredWeight:
    """Multiply each row of a weight that is stored in one way by its factor."""
    if isinstance(weight, torch.Tensor):
        return weight.mul_(factors[:, None])
    if isinstance(weight, GgufWeight):
        weight = weight.quantized()
    matrix = weight.matrix
    given: dict[str, Any] = {}
    for inner, outer in (("scales", "outer_scales"), ("offsets", "outer_offsets")):
        name = inner if getattr(matrix, outer) is None else outer
        if (part := getattr(matrix, name)) is not None:
            given[name] = part.float() * factors[:, None]
    return replace(weight, matrix=matrix._replace(**given))


def columns_of(weight: QuantizedWeight, mine: range) -> StoredWeight:
    """Return the matrix of some inputs. It is dequantised if that cuts a group of inputs."""
    matrix = weight.matrix
    given: dict[str, Any] = {"values": matrix.values[:, mine.start : mine.stop].contiguous()}
    sizes = {"scales": matrix.group_size, "zeros": matrix.group_size, "offsets": matrix.group_size}
    sizes |= {"outer_scales": matrix.outer_size, "outer_offsets": matrix.outer_size}
    if matrix.scales.shape[1] == 1 and not matrix.outer_size:
        given["group_size"] = len(mine)
        return replace(weight, matrix=matrix._replace(**given))
    num_inputs = matrix.values.shape[1]
    for name, size in sizes.items():
        if (part := getattr(matrix, name)) is None:
            continue
        is_cut = mine.start % size or (mine.stop % size and mine.stop != num_inputs)
        if is_cut or matrix.groups is not None:
            return weight.dequantize()[:, mine.start : mine.stop].contiguous()
        given[name] = part[:, mine.start // size : -(-mine.stop // size)].contiguous()
    return replace(weight, matrix=matrix._replace(**given))


def stack(parts: Sequence[StoredWeight]) -> Weight:
    """Concatenate weights along their outputs. Adjacent weights that are stored in the same way
    become one; if there is more than one in the end, the result is a ``SplitWeight``."""
    runs: list[list[StoredWeight]] = []
    for part in parts:
        if runs and _kind(runs[-1][0]) == _kind(part) and _same_groups(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    merged = tuple(_merged(run) for run in runs)
    return merged[0] if len(merged) == 1 else SplitWeight(parts=merged)


def _merged(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Concatenate weights that are stored in the same way."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([plain(part) for part in parts])
    if isinstance(first, GgufWeight):
        rows = [part.rows for part in parts if isinstance(part, GgufWeight)]
        whole = allocate((sum(map(len, rows)), rows[0].shape[1]), torch.uint8)
        return replace(first, rows=torch.cat(rows, out=whole))
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    # Parts have the same inputs; the largest calibrated scale clips none of them.
    scales = [part.input_scale for part in quantized if part.input_scale is not None]
    matrix = concatenated([part.matrix for part in quantized])
    return replace(first, matrix=matrix, input_scale=max(scales, default=None))


def concatenated(matrices: Sequence[Quantized]) -> Quantized:
    """Concatenate matrices of the same format along their outputs."""
    if any(matrix.zeros is not None for matrix in matrices):
        matrices = [matrix._replace(zeros=zeros_of(matrix)) for matrix in matrices]
    tensors = [matrix.by_output() for matrix in matrices]
    merged: dict[str, Any] = {
        name: torch.cat([each[name] for each in tensors]) for name in tensors[0]
    }
    return matrices[0]._replace(**merged)


def _kind(weight: StoredWeight) -> tuple[object, ...]:
    """Everything in which weights agree that can be concatenated, except for their groups."""
    if isinstance(weight, torch.Tensor):
        return (weight.dtype,)
    if isinstance(weight, GgufWeight):
        return weight.kind, weight.dtype
    matrix, has_input_scale = weight.matrix, weight.input_scale is not None
    sizes = matrix.bits, matrix.group_size, matrix.values.shape[1], matrix.scales.shape[1]
    inner = matrix.scales.dtype if matrix.outer_size else None, matrix.outer_size
    codebook = None if matrix.codebook is None else tuple(matrix.codebook.tolist())
    scaling = (*inner, matrix.offsets is not None, codebook)
    inputs = weight.quantizes_inputs, has_input_scale
    return (matrix.values.dtype, *sizes, *scaling, weight.dtype, *inputs)


def _same_groups(one: StoredWeight, other: StoredWeight) -> bool:
    if not isinstance(one, QuantizedWeight) or not isinstance(other, QuantizedWeight):
        return True
    a, b = one.matrix.groups, other.matrix.groups
    return a is b if a is None or b is None else torch.equal(a, b)
