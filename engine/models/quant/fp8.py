"""8-bit float checkpoints as transformers, DeepSeek, Qwen and AutoFP8 write them.

w = weight * scale, with weight [out, in] in float8_e4m3fn. With `weight_block_size`, there is a
scale for each block of outputs and inputs (weight_scale_inv); otherwise one scale, or one per
output. With activation_scheme "static", input_scale is a calibrated scale of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelError
from engine.layers.quantized import QuantizedWeight
from engine.models.quant.fields import (
    FIXED,
    IN,
    OUT,
    SCALES,
    Axis,
    Field,
    Shape,
    by_block,
    by_output,
    choose,
    field_of,
)
from kernels.quantized import Quantized

FLOATS = ("F8_E4M3",)
ONE: tuple[Shape, ...] = ((), (1,))


@dataclass(frozen=True)
class Fp8:
    """The FP8 format. ``block``: (outputs, inputs) that share a scale, if scales are by blocks."""

    block: tuple[int, int] | None
    has_input_scale: bool
    name: str = "fp8"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8:
        scheme = str(field_of(config, "activation_scheme", default="dynamic")).lower()
        choose("activation_scheme", scheme, ("dynamic", "static"))
        choose("fmt", field_of(config, "fmt", default="e4m3"), ("e4m3",))
        choose("scale_fmt", field_of(config, "scale_fmt", default="float"), ("float",))
        choose("expert_dtype", field_of(config, "expert_dtype", default="fp8"), ("fp8",))
        return cls(block_of(field_of(config, "weight_block_size")), scheme == "static")

    def fields(self, module: str, shape: tuple[int, int]) -> Sequence[Field]:
        scales, axes = scale_shapes(shape, self.block), scale_axes(self.block)
        return (
            Field(("weight",), (shape,), FLOATS, axes=(OUT, IN)),
            Field(("weight_scale_inv", "weight_scale"), scales, SCALES, axes=axes),
            Field(
                ("input_scale", "activation_scale"),
                ONE,
                SCALES,
                is_optional=not self.has_input_scale,
            ),
        )

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        outputs, inputs = shape
        scales, block = tensors["weight_scale_inv"], self.block
        matrix = Quantized(
            values=tensors["weight"],
            scales=by_block(scales, block[0], outputs) if block else by_output(scales, outputs),
            bits=8,
            group_size=block[1] if block else inputs,
        )
        return QuantizedWeight(
            matrix=matrix,
            dtype=dtype,
            quantizes_inputs=True,
            input_scale=tensors["input_scale"].item() if self.has_input_scale else None,
        )


def block_of(given: Any) -> tuple[int, int] | None:
    """Return weight_block_size as (outputs, inputs), ``None`` if absent. Raises ``ModelError``."""
    if given is None:
        return None
    if not (isinstance(given, list) and len(given) == 2 and all(isinstance(n, int) for n in given)):
        raise ModelError(f"its quantization has weight_block_size {given!r}, must be two numbers")
    if min(given) < 1:
        raise ModelError(f"its quantization has weight_block_size {given}, must be at least 1")
    return given[0], given[1]


def scale_axes(block: tuple[int, int] | None) -> tuple[Axis, ...]:
    return (OUT, FIXED) if block is None else (Axis(0, block[0]), Axis(1, block[1]))


def scale_shapes(shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[Shape, ...]:
    outputs, inputs = shape
    if block is None:
        return (*ONE, (outputs, 1), (outputs,))
    return ((-(-outputs // block[0]), -(-inputs // block[1])),)
