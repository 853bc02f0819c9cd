"""Weights of checkpoints on the CPU, plain or quantised, from which linear layers are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitWeight:
    """A matrix [out, in] whose outputs are divided into parts that are stored in different ways."""

    parts: tuple[torch.Tensor | QuantizedWeight, ...]
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


Weight = torch.Tensor | QuantizedWeight | SplitWeight


def plain(weight: Weight) -> torch.Tensor:
    """The weight as a plain tensor, dequantised if necessary."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def stack(parts: Sequence[torch.Tensor | QuantizedWeight]) -> Weight:
    """Concatenate weights along their outputs. Adjacent quantised weights of the same format become
    one; if others are left, the result is a ``SplitWeight``."""
    merged: list[torch.Tensor | QuantizedWeight] = []
    for run in _runs_of_alike(parts):
        quantized = [part for part in run if isinstance(part, QuantizedWeight)]
        if quantized:
            merged.append(_merged(quantized))
        else:
            merged.append(torch.cat([part for part in run if isinstance(part, torch.Tensor)]))
    return merged[0] if len(merged) == 1 else SplitWeight(parts=tuple(merged))


def _runs_of_alike(
    parts: Sequence[torch.Tensor | QuantizedWeight],
) -> list[list[torch.Tensor | QuantizedWeight]]:
    """Divide weights into the longest runs of adjacent weights that are stored in the same way."""
    runs: list[list[torch.Tensor | QuantizedWeight]] = []
    for part in parts:
        if runs and _are_alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _merged(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate weights of the same format."""
    if len(parts) == 1:
        return parts[0]
    # Parts have the same inputs; the largest calibrated scale clips none of them.
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    matrix = concatenated([part.matrix for part in parts])
    return replace(parts[0], matrix=matrix, input_scale=max(scales, default=None))


def concatenated(matrices: Sequence[Quantized]) -> Quantized:
    """Concatenate matrices of the same format along their outputs."""
    if any(matrix.zeros is not None for matrix in matrices):
        matrices = [matrix._replace(zeros=zeros_of(matrix)) for matrix in matrices]
    tensors = [matrix.by_output() for matrix in matrices]
    merged: dict[str, Any] = {
        name: torch.cat([each[name] for each in tensors]) for name in tensors[0]
    }
    return matrices[0]._replace(**merged)


def _are_alike(one: torch.Tensor | QuantizedWeight, other: torch.Tensor | QuantizedWeight) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return _kind(one) == _kind(other) and _same_groups(one, other)


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
