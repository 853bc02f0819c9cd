"""Linear layers. Each owns the only copy of its weight, in the fastest layout for the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch.nn import functional as F

import kernels
from engine.errors import ConfigError
from engine.layers.block_linear import block_linear, can_stay_packed
from engine.layers.interface import Linear
from engine.layers.quantized import GgufWeight, QuantizedWeight, SplitWeight, Weight, plain
from engine.layers.quantized_linear import device_linear
from engine.layers.split_linear import split_linear
from kernels.bodies import CPU_TENSORS
from kernels.cpu import isa
from kernels.cpu.matmul import bfloat16, float32, int8
from kernels.cpu.matmul.outputs import NO_CHANGE, Change, Scores
from kernels.cpu.matmul.rows import as_table, gathered_rows
from kernels.cpu.pointwise import ACTS
from kernels.reference.int4 import group_size_of, quantize_int4
from kernels.reference.quant import quantize_fp8, quantize_int8

QUANTIZATIONS = ("int8", "fp8", "int4")


def make_linear(
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    quantization: str | None = None,
    device: torch.device | str = "cpu",
    keeps_float32: bool = False,
    batch_invariant: bool = False,
    quantize_activations: bool = True,
) -> Linear:
    """Create the linear layer for `weight` [out, in] and `bias` [out] on a device.

    quantization: format to quantise a plain weight to: "int8", "int4", "fp8" (only on a GPU) or
    None. A weight that is already quantised stays so if the device has a kernel for it, otherwise
    it is dequantised. keeps_float32: on the CPU, return float32 for bfloat16 inputs.
    batch_invariant: on a GPU, the result of a row does not depend on other rows (always so on the
    CPU). quantize_activations: on the CPU, multiply quantised bfloat16 weights by inputs in 8 bits;
    False keeps the inputs. On the CPU, a layer with float16 weights returns float32. Drop `weight`
    and `bias` afterwards, to free their memory."""
    device = torch.device(device)
    check_quantization(quantization, device)
    if quantization is not None and isinstance(weight, torch.Tensor) and not is_cpu(device):
        weight = weight.to(device)
    if quantization == "int4":
        weight, quantization = in_four_bits(weight), None
    if is_cpu(device):
        layer = None
        if quantization is None:
            layer = packed_linear(weight, bias, keeps_float32, quantize_activations)
        if layer is not None:
            return layer
        return cpu_linear(plain(weight), bias, quantization, keeps_float32)
    bias = None if bias is None else bias.to(device).contiguous()
    if isinstance(weight, torch.Tensor) and quantization is not None:
        weight = quantized(weight, quantization)
    if isinstance(weight, GgufWeight):
        weight = weight.quantized()
    if isinstance(weight, QuantizedWeight):
        on_device = device_linear(weight, bias, device)
        if on_device is not None:
            return on_device
    made = InvariantLinear if batch_invariant else PlainLinear
    return made(plain(weight).to(device), bias)


def packed_linear(
    weight: Weight, bias: torch.Tensor | None, keeps_float32: bool, quantize_activations: bool
) -> Linear | None:
    """Make the layer on a CPU of a weight that stays quantised; ``None`` for other weights."""
    if isinstance(weight, SplitWeight):
        make = partial(
            make_linear, keeps_float32=keeps_float32, quantize_activations=quantize_activations
        )
        return split_linear(weight, bias, make)
    if quantize_activations and is_for_byte_product(weight):
        bias = None if bias is None else bias.float().contiguous()
        return Int8Linear(weight, bias, keeps_float32)
    if isinstance(weight, torch.Tensor) or not can_stay_packed(weight):
        return None
    return block_linear(weight, bias, keeps_float32, quantize_activations=quantize_activations)


def is_for_byte_product(weight: Weight) -> TypeGuard[QuantizedWeight]:
    """True if a CPU multiplies this weight and its inputs as 8-bit integers by output and row."""
    if not isinstance(weight, QuantizedWeight) or weight.dtype is not torch.bfloat16:
        return False
    return int8.IS_SUPPORTED and weight.multiplies_bytes


def is_cpu(device: torch.device) -> bool:
    """Whether the device is a CPU; False in tests in which the CPU runs a GPU's Triton kernels."""
    return device.type == "cpu" and not CPU_TENSORS.are_interpreted


def check_quantization(quantization: str | None, device: torch.device) -> None:
    """Raise ``ConfigError`` if plain weights cannot be quantised to this format on the device."""
    if quantization not in (None, *QUANTIZATIONS):
        raise ConfigError(f"quantization {quantization!r} is unknown; use one of {QUANTIZATIONS}")
    if quantization == "fp8" and is_cpu(device):
        raise ConfigError(
            "quantization='fp8' needs device='cuda', got device='cpu', which cannot multiply 8-bit "
            "floats; use quantization='int8'"
        )


def in_four_bits(weight: Weight) -> Weight:
    """Quantise a plain weight to 4 bits, unless no group size divides its number of inputs."""
    size = group_size_of(weight.shape[1]) if isinstance(weight, torch.Tensor) else None
    if size is None:
        return weight
    return QuantizedWeight(matrix=quantize_int4(plain(weight), size), dtype=plain(weight).dtype)


def quantized(weight: torch.Tensor, quantization: str) -> QuantizedWeight:
    """Quantise a plain weight to "int8" or "fp8"."""
    is_fp8 = quantization == "fp8"
    make = quantize_fp8 if is_fp8 else quantize_int8
    return QuantizedWeight(matrix=make(weight), dtype=weight.dtype, quantizes_inputs=is_fp8)


def cpu_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: str | None,
    keeps_float32: bool = False,
) -> Linear:
    if quantization == "int8":
        bias = None if bias is None else bias.float().contiguous()
        made = Int8Linear if int8.IS_SUPPORTED else TorchInt8Linear
        return made(weight, bias, keeps_float32)
    bias = None if bias is None else bias.contiguous()
    if weight.dtype is torch.bfloat16:
        return BFloat16Linear(weight, bias, keeps_float32)
    if weight.dtype in (torch.float32, torch.float16):
        return Float32Linear(weight, bias)
    return PlainLinear(weight, bias)


def plain_rows(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that reads rows of a plain weight [N, K] by their numbers."""
    table = as_table(weight) if is_cpu(weight.device) else None
    if table is None:
        return partial(F.embedding, weight=weight)
    return partial(gathered_rows, table, num_in=weight.shape[1])


class PlainLinear:
    """A linear layer with an unpacked weight [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, self.weight, self.bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class InvariantLinear(PlainLinear):
    """A linear layer in which the other rows of x do not affect a row's result, bit for bit."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.invariant_linear(x, self.weight, self.bias)


class Float32Linear:
    """A CPU layer with float32 inputs and outputs, and packed float32 or float16 weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if weight.dtype is torch.float16 and not isa.widens_float16():
            weight = weight.float()
        self.packed = float32.pack(weight)
        self.bias = None if bias is None else bias.float()
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return float32.packed_product(
            x.float().contiguous(), self.packed, self.bias, self.out_features
        )

    def then(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """act(outputs) [N, out] by one kernel. activation: one of ``kernels.activate``."""
        x = x.float().contiguous()
        return float32.packed_product(x, self.packed, self.bias, self.out_features, activation)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.packed.dtype is torch.float32:
            return gathered_rows(self.packed, ids, self.in_features)
        return self.packed[ids // float32.PANEL, :, ids % float32.PANEL]


class BFloat16Linear:
    """A CPU layer with packed bfloat16 weights."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, keeps_float32: bool = False
    ) -> None:
        self.packed = bfloat16.pack(weight)
        self.bias = None if bias is None else bias.float()
        self.out_features, self.in_features = weight.shape
        self._out_dtype = torch.float32 if keeps_float32 else torch.bfloat16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return bfloat16.packed_product(
            x.bfloat16().contiguous(),
            self.packed,
            self.bias,
            self.out_features,
            out_dtype=self._out_dtype,
        )

    def has_gates(self, x: torch.Tensor, activation: str) -> bool:
        """True if one kernel computes ``gated``."""
        is_known = activation in ACTS and self._out_dtype is torch.bfloat16
        return self.bias is None and is_known and not self.out_features % (2 * float32.PANEL)

    def gated(
        self, x: torch.Tensor, activation: str, change: Change = NO_CHANGE
    ) -> torch.Tensor | None:
        """act(a) * b [N, out / 2], for the two halves a and b of the outputs, by one kernel;
        ``None`` if the kernel does not support this layer or activation. change: of a and b."""
        if not self.has_gates(x, activation):
            return None
        x, num_out = x.bfloat16().contiguous(), self.out_features
        return bfloat16.gated_product(x, self.packed, num_out, activation, change=change)

    def then(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """act(outputs) [N, out] by one kernel. activation: one of ``kernels.activate``."""
        return bfloat16.packed_product(
            x.bfloat16().contiguous(),
            self.packed,
            self.bias,
            self.out_features,
            out_dtype=self._out_dtype,
            act=activation,
        )

    def largest(self, x: torch.Tensor, scores: Scores | None = None) -> torch.Tensor | None:
        """Index of the largest output of each row of x, [N] int32 (-1 for rows with NaN, +inf or
        only -inf); ``None`` if there is a bias, which the kernel does not support. scores: where to
        write the largest outputs, too."""
        if self.bias is not None:
            return None
        return bfloat16.largest(x.bfloat16().contiguous(), self.packed, self.out_features, scores)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return gathered_rows(self.packed, ids, self.in_features)


class Int8Linear:
    """A CPU layer with 8-bit integer weights and inputs."""

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        keeps_float32: bool = False,
    ) -> None:
        """weight: a plain one, which is quantised here, or one of 8-bit integers with one scale per
        output and no zero points."""
        self._keeps_float32 = keeps_float32
        if isinstance(weight, torch.Tensor):
            self.weight = int8.quantize(weight)
        else:
            self.weight = int8.pack_integers(weight.matrix.values, weight.matrix.scales[:, 0])
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(x, "")

    def then(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """act(outputs) [N, out] by one kernel. activation: one of ``kernels.activate``."""
        wanted = torch.float32 if self._keeps_float32 else x.dtype
        # Most calls convert nothing, so that the steps of such a model can be recorded.
        taken = _float32_or_bfloat16(x)
        out_dtype = wanted if wanted in (torch.float32, torch.bfloat16) else torch.float32
        y = int8.int8_product(taken, self.weight, self.bias, out_dtype=out_dtype, act=activation)
        return y if y.dtype is wanted else y.to(wanted)

    def has_gates(self, x: torch.Tensor, activation: str) -> bool:
        """True if one kernel computes ``gated``."""
        is_rounded = x.dtype is torch.bfloat16 and not self._keeps_float32
        is_known = activation in int8.ACTS and is_rounded
        return self.bias is None and is_known and not self.out_features % (2 * float32.PANEL)

    def gated(
        self, x: torch.Tensor, activation: str, change: Change = NO_CHANGE
    ) -> torch.Tensor | None:
        """act(a) * b [N, out / 2], for the two halves a and b of the outputs, by one kernel;
        ``None`` if the kernel does not support this layer, activation or dtype. change: of a and
        b."""
        if not self.has_gates(x, activation):
            return None
        return int8.gated_product(x.contiguous(), self.weight, activation, change=change)

    def largest(self, x: torch.Tensor, scores: Scores | None = None) -> torch.Tensor | None:
        """Index of the largest output of each row of x, [N] int32 (-1 for rows with NaN, +inf or
        only -inf); ``None`` if there is a bias, which the kernel does not support. scores: where to
        write the largest outputs, too."""
        if self.bias is not None:
            return None
        return int8.largest(_float32_or_bfloat16(x), self.weight, scores)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        packed, scales = self.weight.packed, self.weight.scales
        integers = packed[ids // float32.PANEL, :, ids % float32.PANEL]
        return integers.flatten(1)[:, : self.in_features] * scales[ids, None]


def _float32_or_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous, and converted to float32 if it is neither float32 nor bfloat16."""
    return (x if x.dtype in (torch.float32, torch.bfloat16) else x.float()).contiguous()


class TorchInt8Linear:
    """An 8-bit integer layer by torch, for CPUs without instructions for 8-bit dot products."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, keeps_float32: bool = False
    ) -> None:
        self._keeps_float32 = keeps_float32
        # Integers [out, in] and scales [out, 1].
        self.scales = weight.abs().amax(dim=1, keepdim=True).float().div_(127).clamp_(min=1e-30)
        self.integers = (weight.float() / self.scales).round_().to(torch.int8)
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scales = x.abs().amax(dim=1, keepdim=True).float().div_(127).clamp_(min=1e-30)
        rows = (x.float() / scales).round_().to(torch.int8)
        y = torch._int_mm(rows, self.integers.T).float() * scales * self.scales.T
        y = y if self.bias is None else y + self.bias
        return y if self._keeps_float32 else y.to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.integers[ids] * self.scales[ids]
