"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them: 2, 3, 4 or 8 bits, packed along the
inputs.

qweight [in * bits / 32, out] and qzeros [G, out * bits / 32] int32, scales [G, out], g_idx [in]
int32, the group of each input; w = (q - z) * s. Format "gptq" stores z - 1, "gptq_v2" z itself
(https://github.com/ModelCloud/GPTQModel).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
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
    check_groups,
    check_multiple,
    choose,
    field_of,
    group_axis,
    size_of_group,
    unpack_integers,
)
from kernels.quantized import Quantized


@dataclass(frozen=True)
class Gptq:
    """The GPTQ format. ``group_size`` inputs share a scale and a zero point; -1: all inputs."""

    bits: int
    group_size: int
    is_sorted: bool
    """desc_act: inputs were quantised in another order, so a group's inputs are not adjacent."""
    zero_offset: int
    """Number to add to each stored zero point."""
    name: str = "gptq"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Gptq:
        bits = choose("bits", field_of(config, "bits"), (2, 3, 4, 8))
        version = field_of(config, "checkpoint_format", "format", default="gptq")
        choose("checkpoint_format", str(version).lower(), ("gptq", "gptq_v2"))
        choose("is_marlin_format", field_of(config, "is_marlin_format", default=False), (False,))
        rules = field_of(config, "dynamic", default={})
        if any(not str(rule).startswith("-:") for rule in rules):
            raise ModelError(
                "its quantization has `dynamic` rules with other bits for some modules, which are "
                "not supported"
            )
        return cls(
            bits=bits,
            group_size=size_of_group(field_of(config, "group_size", default=128)),
            is_sorted=bool(field_of(config, "desc_act", default=False)),
            zero_offset=0 if str(version).lower() == "gptq_v2" else 1,
        )

    def fields(self, module: str, shape: tuple[int, int]) -> Sequence[Field]:
        outputs, inputs = shape
        together, groups = 32 // gcd(32, self.bits), -(-inputs // self._size(inputs))
        check_multiple(module, "inputs", inputs, together)
        check_multiple(module, "outputs", outputs, together)
        # Any input may be in any group if they are sorted.
        by_group = FIXED if self.is_sorted else group_axis(self.group_size, inputs)
        some_in, some_out = (Axis(dim, together, together * self.bits // 32) for dim in (1, 0))
        numbers, zeros = (inputs * self.bits // 32, outputs), (groups, outputs * self.bits // 32)
        is_optional = not self.is_sorted
        return (
            Field(("qweight",), (numbers,), INTEGERS, axes=(some_in, OUT)),
            Field(("qzeros",), (zeros,), INTEGERS, axes=(by_group, some_out)),
            Field(("scales",), ((groups, outputs),), SCALES, axes=(by_group, OUT)),
            Field(("g_idx",), ((inputs,),), INTEGERS, is_optional=is_optional, axes=(IN,)),
        )

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        stored = unpack_integers(tensors["qzeros"], self.bits)
        matrix = Quantized(
            values=unpack_integers(tensors["qweight"].T, self.bits),
            scales=tensors["scales"].T.contiguous(),
            bits=self.bits,
            group_size=self._size(shape[1]),
            # The mask undoes the wrap-around of a zero point 0, stored as -1.
            zeros=((stored + self.zero_offset) & (1 << self.bits) - 1).T.contiguous(),
            groups=self._groups(tensors.get("g_idx"), shape[1]),
        )
        return QuantizedWeight(matrix=check_groups(module, matrix), dtype=dtype)

    def _groups(self, stored: torch.Tensor | None, inputs: int) -> torch.Tensor | None:
        """The group of each input [in], or ``None`` if groups are consecutive inputs."""
        if stored is None:
            return None
        regular, groups = torch.arange(inputs) // self._size(inputs), stored.long()
        if not self.is_sorted:  # of some of the inputs there are only their groups
            groups = groups - groups.min()
        return None if torch.equal(groups, regular) else groups

    def _size(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size
