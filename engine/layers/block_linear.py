"""Linear layers on a CPU with weights that stay quantised: 2 to 8 bits, or 8-bit floats."""

from __future__ import annotations

import torch

from engine.layers.quantized import GgufWeight, QuantizedWeight
from kernels.cpu.matmul import bfloat16, float32
from kernels.cpu.matmul.block_product import (
    block_product,
    gated_block_product,
    largest_output,
)
from kernels.cpu.matmul.blocks import BlockWeight, can_pack_blocks, pack_blocks
from kernels.cpu.matmul.dequantized import dequantized_rows, in_order, table_of
from kernels.cpu.matmul.outputs import NO_CHANGE, Change, Scores
from kernels.cpu.pointwise import ACTS
from kernels.quantized import Quantized


class BlockLinear:
    """A bfloat16 layer with a packed weight; products quantise their inputs to 8 bits by units of
    32. A row's results do not depend on the number of rows."""

    def __init__(
        self,
        weight: QuantizedWeight | GgufWeight,
        bias: torch.Tensor | None,
        keeps_float32: bool = False,
    ) -> None:
        """Pack a weight for which `can_stay_packed` is true. keeps_float32: return float32 for
        bfloat16 inputs."""
        is_float = isinstance(weight, QuantizedWeight) and weight.matrix.is_float
        self.packed = blocks_of(weight)
        self.bias = None if bias is None else bias.float()
        self.out_features, self.in_features = weight.shape
        self._table = table_of(self.packed, is_float=is_float)
        self._is_wide = weight.dtype is not torch.bfloat16
        self._out_dtype = torch.float32 if self._is_wide or keeps_float32 else torch.bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._out_dtype)

    def has_gates(self, x: torch.Tensor, activation: str) -> bool:
        """True if one kernel computes ``gated``."""
        is_known = activation in ACTS and self._out_dtype is torch.bfloat16
        return self.bias is None and is_known and not self.out_features % (2 * float32.PANEL)

    def gated(
        self, x: torch.Tensor, activation: str, change: Change = NO_CHANGE
    ) -> torch.Tensor | None:
        """act(a) * b [N, out / 2], for the two halves a and b of the outputs, by one kernel;
        ``None`` if the kernel does not support this layer or activation. change: of a and b."""
        return self._gated(x, activation, change) if self.has_gates(x, activation) else None

    def largest(self, x: torch.Tensor, scores: Scores | None = None) -> torch.Tensor | None:
        """Index of the largest output of each row of x, [N] int32 (-1 for rows with NaN, +inf or
        only -inf); ``None`` if the kernel does not support this layer."""
        return None if self.bias is not None or self._is_wide else self._largest(x, scores)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self._is_wide else torch.bfloat16
        return dequantized_rows(self._table, ids, self.in_features, dtype)

    def _product(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        x = x.bfloat16().contiguous()
        return block_product(x, self.packed, self.bias, out_dtype=out_dtype)

    def _gated(self, x: torch.Tensor, activation: str, change: Change) -> torch.Tensor:
        x = x.bfloat16().contiguous()
        return gated_block_product(x, self.packed, activation, change=change)

    def _largest(self, x: torch.Tensor, scores: Scores | None) -> torch.Tensor:
        return largest_output(x.bfloat16().contiguous(), self.packed, scores)


class ExactBlockLinear(BlockLinear):
    """A layer with a packed weight, which is dequantised by panels in each product.

    With a weight of other dtypes than bfloat16, inputs and results are float32. Results have the
    bits of a layer with the dequantised weight, except that inputs are summed in the order of their
    groups if groups are not adjacent inputs."""

    def _product(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        x = self._inputs(x)
        if self._is_wide:
            return float32.dequantized_product(x, self._table, self.bias, self.out_features)
        return bfloat16.packed_product(
            x, self._table, self.bias, self.out_features, out_dtype=out_dtype
        )

    def _gated(self, x: torch.Tensor, activation: str, change: Change) -> torch.Tensor:
        x, num_out = self._inputs(x), self.out_features
        return bfloat16.gated_product(x, self._table, num_out, activation, change=change)

    def _largest(self, x: torch.Tensor, scores: Scores | None) -> torch.Tensor:
        return bfloat16.largest(self._inputs(x), self._table, self.out_features, scores)

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Convert inputs to the dtype of the product, in the order of the packed columns."""
        x = (x.float() if self._is_wide else x.bfloat16()).contiguous()
        return x if self.packed.order is None else in_order(x, self.packed.order)


def blocks_of(weight: QuantizedWeight | GgufWeight) -> BlockWeight:
    """Pack a weight for which `can_stay_packed` is true."""
    if isinstance(weight, GgufWeight):
        return weight.blocks()
    matrix = weight.matrix
    return pack_blocks(as_bytes(matrix) if matrix.is_float else matrix)


def block_linear(
    weight: QuantizedWeight | GgufWeight,
    bias: torch.Tensor | None,
    keeps_float32: bool,
    *,
    quantize_activations: bool,
) -> BlockLinear:
    """Make the layer for a weight for which `can_stay_packed` is true. Inputs are quantised only if
    the weight has integers and dtype bfloat16."""
    is_float = isinstance(weight, QuantizedWeight) and weight.matrix.is_float
    is_exact = not quantize_activations or is_float or weight.dtype is not torch.bfloat16
    made = ExactBlockLinear if is_exact else BlockLinear
    return made(weight, bias, keeps_float32)


def can_stay_packed(weight: QuantizedWeight | GgufWeight) -> bool:
    """True if `BlockLinear` supports the weight; others are dequantised when they are loaded."""
    if isinstance(weight, GgufWeight):
        return True
    matrix = weight.matrix
    return can_pack_blocks(as_bytes(matrix) if matrix.is_float else matrix)


def as_bytes(matrix: Quantized) -> Quantized:
    """Returns a matrix of 8-bit floats as if its values were integers of 8 bits."""
    return matrix._replace(values=matrix.values.view(torch.uint8))
