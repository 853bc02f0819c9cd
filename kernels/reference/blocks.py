"""The integer product of packed weights in plain torch: the bits that every kernel must return."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.cpu.matmul.blocks import PANEL, UNIT, BlockWeight, unpack_values

LARGEST = 127  # magnitude of a quantised activation
LEAST = 2.0**-100  # inputs of units below this magnitude count as zero


class QuantizedRows(NamedTuple):
    """Rows of activations as 8-bit integers with one scale for each unit of 32 inputs."""

    integers: torch.Tensor  # [M, U, 32] int8
    scales: torch.Tensor  # [M, U] float32


def quantize_units(x: torch.Tensor) -> QuantizedRows:
    """Quantise x [M, K], rounded to nearest even. A unit with an infinite input or NaN gets an
    infinite or NaN scale and zeros."""
    missing = -x.shape[1] % UNIT
    units = torch.nn.functional.pad(x.float(), (0, missing)).unflatten(1, (-1, UNIT))
    most = units.abs().amax(2)
    is_used = most.isfinite() & (most >= LEAST)
    inverse = torch.where(is_used, torch.full_like(most, LARGEST) / most, 0.0)
    integers = torch.where(is_used[..., None], units * inverse[..., None], 0.0).round()
    return QuantizedRows(integers.to(torch.int8), most / LARGEST)


def block_product(
    x: torch.Tensor,
    weight: BlockWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return x @ weight + bias [M, N] with activations quantised by units. x: [M, K] bfloat16 or
    float32; bias: [N] float32; out_dtype: default that of x."""
    rows = quantize_units(x if weight.order is None else x[:, weight.order.long()])
    values = unpack_values(weight.values, weight.bits)
    if weight.codebook is not None:
        values = weight.codebook[values.long()]
    scales = decoded(weight, weight.scales, weight.outer_scales)
    offsets = None
    if weight.offsets is not None:
        offsets = decoded(weight, weight.offsets, weight.outer_offsets)
    step = UNIT // weight.halves
    total = torch.zeros((len(x), len(values)))
    for number in range(weight.units * weight.halves):
        unit, start = divmod(number * step, UNIT)
        a = rows.integers[:, unit, start : start + step].float()
        a_scale = rows.scales[:, unit, None]
        first = unit * UNIT + start
        sums = (a @ values[:, first : first + step].float().T).to(torch.int32)  # exact
        share = a.sum(1, keepdim=True)
        sums -= weight.zero * share.int()
        total = fused(sums.float(), scales[number] * a_scale, total)
        if offsets is not None:
            total = fused(offsets[number].expand_as(total), a_scale * share, total)
    total = total[:, : weight.num_outputs]
    if bias is not None:
        total = total + bias
    return total.to(out_dtype or x.dtype)


def decoded(weight: BlockWeight, inner: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
    """Returns scales or offsets [P, G, 32] as float32 [units * halves, P * 32]."""
    count = weight.units * weight.halves
    step = UNIT // weight.halves
    wide = inner.float()
    if outer is not None:
        wide = (
            wide
            * outer.repeat_interleave(weight.outer_size // weight.group_size, 1)[:, : wide.shape[1]]
        )
    wide = wide.repeat_interleave(weight.group_size // step, 1)[:, :count]
    return wide.transpose(0, 1).reshape(count, -1, PANEL).flatten(1)


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a * b + c of float32, rounded once. a has at most 24 significant bits."""
    product, addend = a.double() * b.double(), c.double()  # the product is exact
    total = product + addend
    # What rounding to float64 lost; if anything, the last bit is set ("rounding to odd"), so that
    # rounding to float32 sees on which side of a midpoint the exact sum is.
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    is_even = (lost != 0) & (bits & 1 == 0) & total.isfinite()
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where(is_even, bits + step, bits).view(torch.float64).float()
