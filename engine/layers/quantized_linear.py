"""Linear layers with quantised weights on a GPU; on the CPU they are dequantised when loaded."""

from __future__ import annotations

import torch

from engine.layers.interface import Linear
from engine.layers.quantized import QuantizedWeight
from kernels import quant
from kernels.quantized import Packed, Quantized, can_pack, pack, unpack
from kernels.reference.quant import dequantize

FP8_ALIGNMENT = 16  # of inputs and outputs in torch's 8-bit float product
FP8_CAPABILITY = (8, 9)


class WeightOnlyLinear:
    """A GPU layer with packed weights, which are dequantised inside the matrix product."""

    def __init__(self, packed: Packed, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.packed = packed
        self.bias = bias
        self.dtype = dtype
        self.out_features, self.in_features = packed.num_outputs, packed.num_inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quant.weight_only_product(x, self.packed, self.bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return dequantize(unpack(self.packed.of_outputs(ids)), self.dtype)


class Fp8Linear:
    """A GPU layer that multiplies weights and inputs as 8-bit floats, by torch. Weights have one
    scale per output; inputs have one scale per row or one calibrated scale."""

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.values = weight.matrix.values.to(device).contiguous()  # [out, in]
        self.scales = weight.matrix.scales.float().T.to(device).contiguous()  # [1, out]
        self.bias = bias
        self.dtype = weight.dtype
        self.input_scale = (
            None if weight.input_scale is None else torch.tensor([weight.input_scale]).to(device)
        )
        self.one = torch.ones((), device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, scales = quant.quantize_rows(x, self.input_scale)
        y = self.product(rows, scales, x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def product(self, rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Multiply by the weight: rows [M, in] float8_e4m3fn, scales [M, 1] float32 -> [M, out]."""
        columns = self.values.T
        if dtype is torch.bfloat16:  # torch supports row scales only for bfloat16 outputs
            return torch._scaled_mm(
                rows, columns, scale_a=scales, scale_b=self.scales, out_dtype=dtype
            )
        y = torch._scaled_mm(
            rows, columns, scale_a=self.one, scale_b=self.one, out_dtype=torch.float32
        )
        return y.mul_(scales).mul_(self.scales).to(dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.values.view(torch.uint8)[ids].view(self.values.dtype)
        return (values.float() * self.scales[0, ids, None]).to(self.dtype)


def device_linear(
    weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device
) -> WeightOnlyLinear | Fp8Linear | None:
    """The layer for a quantised weight on a GPU; ``None`` if no kernel supports this weight."""
    matrix = weight.matrix
    if matrix.is_float and not has_fp8(device):
        return None
    if is_for_fp8_product(weight):
        return Fp8Linear(weight, bias, device)
    if can_pack(matrix):
        return WeightOnlyLinear(pack(matrix).to(device), bias, weight.dtype)
    return None


def packed_of(linear: Linear) -> Packed | None:
    """The packed weight of a quantised layer; ``None`` for a plain layer or one with a bias."""
    if not isinstance(linear, WeightOnlyLinear | Fp8Linear) or linear.bias is not None:
        return None
    if isinstance(linear, WeightOnlyLinear):
        return linear.packed
    scales = linear.scales.T  # [out, 1]
    return pack(Quantized(linear.values, scales, bits=8, group_size=linear.in_features))


def is_for_fp8_product(weight: QuantizedWeight) -> bool:
    is_by_output = weight.matrix.is_float and weight.matrix.scales.shape[1] == 1
    is_aligned = all(size % FP8_ALIGNMENT == 0 for size in weight.shape)
    return weight.quantizes_inputs and is_by_output and is_aligned


def has_fp8(device: torch.device) -> bool:
    """True if a device supports e4m3fn floats."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
