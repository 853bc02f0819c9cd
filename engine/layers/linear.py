"""Linear layers that own the only copy of their weights, in the form fastest on the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from engine.errors import ConfigError
from kernels.cpu import matmul, matmul_int8

QUANTIZATIONS = ("int8",)


class Linear(Protocol):
    """y = x @ weight.T + bias."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in] -> [N, out], a new tensor of x's dtype."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, for an embedding tied to the output layer: [N] -> [N, in]."""
        ...


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantization: str | None = None,
    device: torch.device | str = "cpu",
) -> Linear:
    """Take over `weight` [out, in] and `bias` [out]; the caller drops its own references.

    quantization: None, or "int8" (weights per channel, activations per token at run time; CPU).
    float32 on the CPU is packed once; every other dtype and device goes to torch's own product.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise ConfigError(f"unknown quantization {quantization!r}: use one of {QUANTIZATIONS}")
    on_cpu = torch.device(device).type == "cpu"
    if quantization == "int8":
        if not on_cpu:
            raise ConfigError(f"quantization 'int8' needs device='cpu', got device={device!r}")
        bias = None if bias is None else bias.float().contiguous()
        return (
            Int8Linear(weight, bias) if matmul_int8.IS_SUPPORTED else TorchInt8Linear(weight, bias)
        )
    bias = None if bias is None else bias.to(device).contiguous()
    if on_cpu and weight.dtype is torch.float32:
        return PackedLinear(weight, bias)
    return PlainLinear(weight.to(device), bias)


class PlainLinear:
    """torch's own product on the weights as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class PackedLinear:
    """Compiled product on float32 weights in panels; see kernels.cpu.matmul."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = matmul.pack(weight)
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return matmul.packed_product(x.contiguous(), self.packed, self.bias, self.out_features)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.packed[ids // matmul.PANEL, :, ids % matmul.PANEL]


class Int8Linear:
    """Compiled product of 8-bit weights and activations; see kernels.cpu.matmul_int8."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = matmul_int8.quantize(weight)
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = matmul_int8.int8_product(x.float().contiguous(), self.weight, self.bias)
        return y.to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        packed, scales, _ = self.weight
        integers = packed[ids // matmul.PANEL, :, ids % matmul.PANEL]
        return integers.flatten(1)[:, : self.in_features] * scales[ids, None]


class TorchInt8Linear:
    """The same arithmetic by torch, where the processor lacks the 8-bit dot product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.scales = weight.abs().amax(dim=1, keepdim=True).float().div_(127).clamp_(min=1e-30)
        self.integers = (weight.float() / self.scales).round_().to(torch.int8)
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scales = x.abs().amax(dim=1, keepdim=True).float().div_(127).clamp_(min=1e-30)
        rows = (x.float() / scales).round_().to(torch.int8)
        y = torch._int_mm(rows, self.integers.T).float() * scales * self.scales.T
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.integers[ids] * self.scales[ids]
