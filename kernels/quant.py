"""Products with quantised weights, and the rows that 8-bit products take; bodies by device.

Where no body is compiled for a device, plain torch computes on what the weights stand for.
"""

from __future__ import annotations

import torch

from kernels.bodies import triton_for
from kernels.quantized import Packed
from kernels.reference import quant as reference


def weight_only_product(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias: [M, K] -> [M, N] of x's dtype; bias: [N]. x's last axis has no gaps."""
    body = triton_for(x) or reference
    return body.weight_only_product(x, packed, bias)


def quantize_rows(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / scales as float8_e4m3fn [M, K], scales [M, 1] float32); saturates at 448.

    scale: [1] float32 for all rows; None takes each row's largest number as the largest float.
    """
    body = triton_for(x) or reference
    return body.quantize_rows(x, scale)
