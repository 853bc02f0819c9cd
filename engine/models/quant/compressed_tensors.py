"""compressed-tensors checkpoints as llm-compressor writes them: 8-bit floats and integers.

Each group of modules has a scheme. Integers are signed: w = (q - z) * s. "pack-quantized" adds
2**(bits-1) to q and z and packs several in each int32, the lowest bits first: q along the inputs, z
along the outputs (https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelError
from engine.layers.quantized import QuantizedWeight
from engine.models.quant.fields import (
    FIXED,
    IN,
    INTEGERS,
    OUT,
    SCALES,
    Axis,
    Field,
    Shape,
    by_block,
    by_output,
    check_groups,
    choose,
    field_of,
    group_axis,
    num_groups,
    size_of_group,
    unpack_integers,
)
from engine.models.quant.fp8 import FLOATS, ONE, block_of
from kernels.quantized import Quantized

PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
PACKED = "pack-quantized"
BYTES = ("I8",)
SIGN = 0x80  # flips signed bytes into unsigned ones


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The storage scheme of a group of modules."""

    targets: tuple[str, ...]
    kind: str
    """How weights are stored: float, int or packed."""
    bits: int
    group_size: int
    """Inputs per scale; -1: one scale per output, or one for the whole weight."""
    block: tuple[int, int] | None
    is_symmetric: bool
    is_sorted: bool
    """actorder "group": each input is assigned to a group by an index."""
    quantizes_inputs: bool
    has_input_scale: bool

    def fields(self, module: str, shape: tuple[int, int]) -> Sequence[Field]:
        outputs, inputs = shape
        axes = self._scale_axes(inputs)
        scales = Field(("weight_scale",), self._scale_shapes(module, shape), SCALES, axes=axes)
        if self.kind == "float":
            calibrated = Field(("input_scale",), ONE, SCALES, is_optional=not self.has_input_scale)
            return Field(("weight",), (shape,), FLOATS, axes=(OUT, IN)), scales, calibrated
        numbers = Field(("weight",), (shape,), BYTES, axes=(OUT, IN))
        zeros = Field(("weight_zero_point",), scales.shapes, BYTES, self.is_symmetric, axes)
        if self.kind == "packed":
            in_a_number = 32 // self.bits
            packed = (outputs, -(-inputs // in_a_number))
            zero_shape = (-(-outputs // in_a_number), scales.shapes[0][1])
            some = Axis(1, in_a_number)
            numbers = Field(("weight_packed",), (packed,), INTEGERS, axes=(OUT, some))
            by_number = (Axis(0, in_a_number), axes[1])
            zeros = zeros._replace(shapes=(zero_shape,), dtypes=INTEGERS, axes=by_number)
        is_optional = not self.is_sorted
        order = Field(("weight_g_idx",), ((inputs,),), INTEGERS, is_optional, (IN,))
        return numbers, scales, zeros, order

    def _scale_axes(self, inputs: int) -> tuple[Axis, Axis]:
        if self.block is not None:
            return Axis(0, self.block[0]), Axis(1, self.block[1])
        # Any input may be in any group if they are sorted.
        return OUT, FIXED if self.is_sorted else group_axis(self.group_size, inputs)

    def _scale_shapes(self, module: str, shape: tuple[int, int]) -> tuple[Shape, ...]:
        outputs, inputs = shape
        if self.block is not None:
            return ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        if self.group_size != -1:
            return ((outputs, num_groups(module, inputs, self.group_size)),)
        return ((outputs, 1), (outputs,), *ONE)

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        outputs, inputs = shape
        scales = self._scales(tensors, outputs)
        matrix = Quantized(
            values=self._values(tensors, inputs),
            scales=scales,
            bits=self.bits,
            group_size=inputs // scales.shape[1] if self.block is None else self.block[1],
            zeros=self._zeros(tensors, scales.shape),
            groups=tensors["weight_g_idx"].long() if self.is_sorted else None,
        )
        return QuantizedWeight(
            matrix=check_groups(module, matrix),
            dtype=dtype,
            quantizes_inputs=self.quantizes_inputs,
            input_scale=tensors["input_scale"].item() if self.has_input_scale else None,
        )

    def _scales(self, tensors: Mapping[str, torch.Tensor], outputs: int) -> torch.Tensor:
        stored = tensors["weight_scale"]
        if self.block is not None:
            return by_block(stored, self.block[0], outputs)
        return stored if self.group_size != -1 else by_output(stored, outputs)

    def _values(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> torch.Tensor:
        if self.kind == "packed":
            return unpack_integers(tensors["weight_packed"], self.bits)[:, :inputs].contiguous()
        stored = tensors["weight"]
        return stored if self.kind == "float" else stored.view(torch.uint8) ^ SIGN

    def _zeros(self, tensors: Mapping[str, torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
        stored = tensors.get("weight_zero_point")
        if stored is None:
            return None
        if self.kind == "packed":
            return unpack_integers(stored.T, self.bits)[:, : shape[0]].T.contiguous()
        return (stored.view(torch.uint8) ^ SIGN).reshape(-1, shape[1]).expand(shape).contiguous()


@dataclass(frozen=True)
class CompressedTensors:
    """The compressed-tensors format of a checkpoint, with a scheme for each group of modules."""

    schemes: tuple[Scheme, ...]
    name: str = "compressed-tensors"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CompressedTensors:
        sparsity = field_of(config, "sparsity_config", default={})
        choose("sparsity_config of format", sparsity.get("format", "dense"), ("dense",))
        if config.get("transform_config"):
            raise ModelError("its quantization has a transform_config, which is not supported")
        groups = field_of(config, "config_groups", default={})
        if not isinstance(groups, dict) or not groups:
            raise ModelError("its quantization has no config_groups")
        common = field_of(config, "format", default="")
        return cls(tuple(scheme_of(group, common) for group in groups.values()))

    def fields(self, module: str, shape: tuple[int, int]) -> Sequence[Field]:
        return self._scheme(module).fields(module, shape)

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        return self._scheme(module).weight(module, shape, tensors, dtype)

    def _scheme(self, module: str) -> Scheme:
        """The scheme that has the module among its targets, or else the scheme for "Linear"."""
        for scheme in self.schemes:
            if any(names(target, module) for target in scheme.targets):
                return scheme
        for scheme in self.schemes:
            if "Linear" in scheme.targets:
                return scheme
        raise ModelError(f"{module} is quantized, but is in no group of config_groups")


def names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def scheme_of(group: Any, common: str) -> Scheme:
    """The scheme of an entry of config_groups. Raises ``ModelError`` for unsupported options."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelError(f"its quantization has a group without weights: {group!r}")
    choose("output_activations", group.get("output_activations"), (None,))
    layout = choose("format", field_of(group, "format", default=common), (*PLAIN_FORMATS, PACKED))
    number = choose(
        "weights of type", str(field_of(weights, "type", default="int")), ("int", "float")
    )
    strategy = strategy_of(weights)
    inputs = field_of(group, "input_activations", default={})
    # Weights and inputs of the same type are multiplied as such.
    is_alike = inputs.get("type", "int") == number and inputs.get("num_bits") == 8
    is_float_input = number == "float" and inputs.get("type") == "float"
    block = field_of(weights, "block_structure", "group_size") if strategy == "block" else None
    return Scheme(
        targets=tuple(map(str, field_of(group, "targets", default=("Linear",)))),
        kind="packed" if layout == PACKED else number,
        bits=bits_of(weights, layout, number),
        group_size=size_of_group(weights.get("group_size")) if strategy == "group" else -1,
        block=block_of(block),
        is_symmetric=bool(field_of(weights, "symmetric", default=True)),
        is_sorted=number == "int" and weights.get("actorder") in (True, "group", "dynamic"),
        quantizes_inputs=is_alike and layout != PACKED,
        has_input_scale=is_float_input and not inputs.get("dynamic"),
    )


def strategy_of(weights: Mapping[str, Any]) -> str:
    """Return which weights share a scale: all of a "tensor", a "channel" (one output), a "group" or
    a "block". A config without a strategy implies it by group_size."""
    size = weights.get("group_size")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    stated = field_of(weights, "strategy", default=by_size)
    return str(choose("strategy", stated, ("tensor", "channel", "group", "block")))


def bits_of(weights: Mapping[str, Any], layout: str, number: str) -> int:
    readable = (4, 8) if layout == PACKED and number == "int" else (8,)
    if layout == PACKED:
        choose("packed weights of type", number, ("int",))
    return int(choose(f"{layout} weights of num_bits", weights.get("num_bits", 8), readable))
