"""Quantised weights of checkpoints on the CPU, from which linear layers are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.quantized import Quantized
from kernels.reference.quant import dequantize, zeros_of


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A quantised matrix [out, in]. ``dtype``: type of the numbers before quantisation."""

    matrix: Quantized
    dtype: torch.dtype
    quantizes_inputs: bool = False
    """True if the product may also quantise its inputs to 8-bit floats."""
    input_scale: float | None = None
    """Calibrated scale of quantised inputs; ``None``: a scale is computed for each row."""

    @property
    def shape(self) -> torch.Size:
        return self.matrix.values.shape

    def dequantize(self) -> torch.Tensor:
        """Return the matrix [out, in], dequantised to ``dtype``."""
        return dequantize(self.matrix, self.dtype)


Weight = torch.Tensor | QuantizedWeight


def plain(weight: Weight) -> torch.Tensor:
    """The weight as a plain tensor, dequantised if necessary."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def stack(parts: Sequence[Weight]) -> Weight:
    """Concatenate weights along their outputs. Weights of different formats are dequantised."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(parts) == 1:
        return parts[0]
    if len(quantized) < len(parts) or not _are_alike(quantized):
        return torch.cat([plain(part) for part in parts])
    first = quantized[0]
    matrix = concatenated([part.matrix for part in quantized])
    # Parts have the same inputs; the largest calibrated scale clips none of them.
    scales = [part.input_scale for part in quantized if part.input_scale is not None]
    return QuantizedWeight(
        matrix=matrix,
        dtype=first.dtype,
        quantizes_inputs=first.quantizes_inputs,
        input_scale=max(scales, default=None),
    )


def concatenated(matrices: Sequence[Quantized]) -> Quantized:
    """Concatenate matrices of the same format along their outputs."""
    if any(matrix.zeros is not None for matrix in matrices):
        matrices = [matrix._replace(zeros=zeros_of(matrix)) for matrix in matrices]
    tensors = [matrix.by_output() for matrix in matrices]
    merged: dict[str, Any] = {
        name: torch.cat([each[name] for each in tensors]) for name in tensors[0]
    }
    return matrices[0]._replace(**merged)


def _are_alike(weights: Sequence[QuantizedWeight]) -> bool:
    first = weights[0]
    return all(_kind(w) == _kind(first) and _same_groups(w, first) for w in weights[1:])


def _kind(weight: QuantizedWeight) -> tuple[object, ...]:
    matrix, has_input_scale = weight.matrix, weight.input_scale is not None
    sizes = matrix.bits, matrix.group_size, matrix.values.shape[1], matrix.scales.shape[1]
    inner = matrix.scales.dtype if matrix.outer_size else None, matrix.outer_size
    codebook = None if matrix.codebook is None else tuple(matrix.codebook.tolist())
    scaling = (*inner, matrix.offsets is not None, codebook)
    inputs = weight.quantizes_inputs, has_input_scale
    return (matrix.values.dtype, *sizes, *scaling, weight.dtype, *inputs)


def _same_groups(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    a, b = one.matrix.groups, other.matrix.groups
    return a is b if a is None or b is None else torch.equal(a, b)
