"""Quantisation of plain weights to 4-bit integers in groups of inputs."""

from __future__ import annotations

import torch

from kernels.quantized import Quantized

GROUP_SIZES = (128, 32)
"""Inputs that share a scale: the first of these sizes that divides the number of inputs."""
# Quantised at once. Torch uses one thread for so few, so no step waits for a busy core.
PIECE_ELEMENTS = 1 << 15
LOWEST, HIGHEST = -8, 7
# Adding and subtracting this rounds a float32 to the nearest even integer, as torch.round does.
# torch.round uses all threads even for a few numbers.
ROUNDING = 1.5 * 2**23


def group_size_of(num_inputs: int, sizes: tuple[int, ...] = GROUP_SIZES) -> int | None:
    """Return the first of ``sizes`` that divides the number of inputs; ``None`` if none does."""
    return next((size for size in sizes if num_inputs % size == 0), None)


def quantize_int4(weight: torch.Tensor, group_size: int) -> Quantized:
    """Quantise a weight [N, K] to the nearest symmetric 4-bit integers, with one scale per group.

    group_size: inputs per scale; divides K. The number of a group that is largest in magnitude
    becomes -8, so scales may be negative. Scales have the dtype of the weight."""
    num_outputs, num_inputs = weight.shape
    values = weight.new_empty((num_outputs, num_inputs), dtype=torch.uint8)
    scales = weight.new_empty((num_outputs, num_inputs // group_size))
    rows = max(1, PIECE_ELEMENTS // max(1, num_inputs))
    for begin in range(0, num_outputs, rows):
        piece = slice(begin, min(begin + rows, num_outputs))
        groups = weight[piece].float().view(-1, num_inputs // group_size, group_size)
        lowest, highest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        peaks = torch.where(-lowest >= highest, lowest, highest)
        scales[piece] = (peaks / LOWEST).squeeze(2).to(scales.dtype)
        # The integers are those of the rounded scales; a scale of 0 has only zeros.
        stored = scales[piece].float().unsqueeze(2)
        quotients = groups / torch.where(stored == 0, 1, stored)
        integers = quotients.add_(ROUNDING).sub_(ROUNDING)
        shifted = integers.clamp_(LOWEST, HIGHEST).sub_(LOWEST)
        values[piece] = shifted.to(torch.uint8).flatten(1)
    return Quantized(values, scales, bits=4, group_size=group_size)
