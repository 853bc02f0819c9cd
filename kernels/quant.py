"""Products with quantised weights, and quantisation of inputs. On devices without a kernel, torch
computes with dequantised weights."""

from __future__ import annotations

import torch

from kernels.bodies import triton_for
from kernels.quantized import Packed
from kernels.reference import quant as reference


def weight_only_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, with quantised weights: x [M, K] with contiguous rows, bias [N] -> [M,
    N] of x's dtype."""
    body = triton_for(x) or reference
    return body.weight_only_product(x, packed, bias)


def quantize_rows(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x / scales as float8_e4m3fn [M, K], clamped to 448, and the scales [M, 1] float32.

    scale: [1] float32 for all rows; None: each row is scaled so that its largest number is 448.
    """
    body = triton_for(x) or reference
    return body.quantize_rows(x, scale)
