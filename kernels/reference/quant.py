"""Quantisation, dequantisation and products of quantised weights in plain torch.

As in the tools that write these formats, w = (q - z) * s, with value q, zero point z, scale s;
or w = q * s + o, with offset o; or w = codebook[q] * s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantized import Packed, Quantized, unpack
from kernels.reference.pointwise import wide

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_SCALE = 1e-30  # for rows of zeros


def dequantize(matrix: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise a matrix to [N, K], computed in float32."""
    weight = _numbers(matrix)
    grouped, spread = _by_group(matrix, weight)
    if matrix.zeros is not None:
        grouped.sub_(spread(matrix.zeros.float()))
    elif matrix.zero and not matrix.is_float:
        grouped.sub_(matrix.zero)
    grouped.mul_(spread(scales_of(matrix)))
    offsets = offsets_of(matrix)
    if offsets is not None:
        grouped.add_(spread(offsets))
    return weight.to(dtype)


def _numbers(matrix: Quantized) -> torch.Tensor:
    """Return the values [N, K] in float32, looked up in the codebook if there is one."""
    if matrix.codebook is None:
        return matrix.values.float()
    ids = matrix.values.flatten().int()
    return matrix.codebook.float().index_select(0, ids).view(matrix.values.shape)


def _by_group(matrix: Quantized, weight: torch.Tensor) -> tuple[torch.Tensor, Callable]:
    """Return the weight [N, K] in a shape to which groups can be applied, and a function that
    broadcasts a tensor [N, G] to that shape."""
    num_inputs, num_groups = weight.shape[1], matrix.scales.shape[1]
    groups = matrix.groups
    if groups is None and num_inputs == num_groups * matrix.group_size:
        return weight.view(len(weight), num_groups, -1), lambda part: part[..., None]
    if groups is None:
        groups = torch.arange(num_inputs, device=weight.device) // matrix.group_size
    return weight, lambda part: part.index_select(1, groups)


def scales_of(matrix: Quantized) -> torch.Tensor:
    """Returns the scale of each group, [N, G] float32."""
    return _times_outer(matrix, matrix.scales.float(), matrix.outer_scales)


def offsets_of(matrix: Quantized) -> torch.Tensor | None:
    """Returns the offset of each group, [N, G] float32; None if the matrix has no offsets."""
    if matrix.offsets is None:
        return None
    return _times_outer(matrix, matrix.offsets.float(), matrix.outer_offsets)


def _times_outer(
    matrix: Quantized, inner: torch.Tensor, outer: torch.Tensor | None
) -> torch.Tensor:
    """Multiply numbers of groups [N, G] by those of the blocks [N, S] in which the groups are."""
    if outer is None:
        return inner
    groups = torch.arange(inner.shape[1], device=inner.device)
    return outer.index_select(1, groups * matrix.group_size // matrix.outer_size) * inner


def zeros_of(matrix: Quantized) -> torch.Tensor:
    """Returns a matrix's zero points [N, G] uint8; `zero` if it stores none."""
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.full_like(matrix.scales, matrix.zero, dtype=torch.uint8)


def weight_only_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias with a packed weight: x [M, K], bias [N] -> [M, N] of x's dtype."""
    product = wide(x) @ dequantize(unpack(packed), torch.float32).to(wide(x).dtype).T
    return (product if bias is None else product + bias).to(x.dtype)


def quantize_rows(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows of x [M, K] to float8_e4m3fn. Returns values and scales."""
    if scale is None:
        scales = (wide(x).abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=LEAST_SCALE)
    else:
        scales = scale.expand(len(x), 1)
    return (wide(x) / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales.float().contiguous()


def quantize_fp8(weight: torch.Tensor) -> Quantized:
    """Quantise a weight [N, K] to 8-bit floats with one scale per output."""
    values, scales = quantize_rows(weight)
    return Quantized(values, scales, bits=8, group_size=weight.shape[1])


def quantize_int8(weight: torch.Tensor) -> Quantized:
    """Quantise a weight [N, K] to symmetric 8-bit integers with one scale per output."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_(min=LEAST_SCALE)
    integers = (weight.float() / scales).round_() + 128
    return Quantized(integers.to(torch.uint8), scales, bits=8, group_size=weight.shape[1])
