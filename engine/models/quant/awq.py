"""AWQ checkpoints as AutoAWQ writes them: 4 bits, eight outputs interleaved in one int32.

Layout of version "gemm" (https://github.com/casper-hansen/AutoAWQ): qweight [in, out / 8] and
qzeros [G, out / 8] int32, scales [G, out]; w = (q - z) * s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.layers.quantized import QuantizedWeight
from engine.models.quant.fields import (
    IN,
    INTEGERS,
    OUT,
    SCALES,
    Axis,
    Field,
    as_bytes,
    check_multiple,
    choose,
    field_of,
    group_axis,
    num_groups,
    size_of_group,
)
from kernels.quantized import Quantized

IN_A_NUMBER = 8
# The outputs in an int32, from its lowest bits on.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq:
    """The AWQ format. ``group_size`` inputs share a scale and a zero point; -1: all inputs."""

    group_size: int
    name: str = "awq"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Awq:
        choose("bits", field_of(config, "bits", "w_bit", default=4), (4,))
        version = field_of(config, "version", "format", "checkpoint_format", default="gemm")
        choose("version", str(version).lower(), ("gemm",))
        choose("zero_point", field_of(config, "zero_point", default=True), (True,))
        return cls(size_of_group(field_of(config, "group_size", "q_group_size", default=128)))

    def fields(self, module: str, shape: tuple[int, int]) -> Sequence[Field]:
        outputs, inputs = shape
        check_multiple(module, "outputs", outputs, IN_A_NUMBER)
        packed, groups = outputs // IN_A_NUMBER, num_groups(module, inputs, self._size(inputs))
        by_group, eights = group_axis(self.group_size, inputs), Axis(0, IN_A_NUMBER)
        return (
            Field(("qweight",), ((inputs, packed),), INTEGERS, axes=(IN, eights)),
            Field(("qzeros",), ((groups, packed),), INTEGERS, axes=(by_group, eights)),
            Field(("scales",), ((groups, outputs),), SCALES, axes=(by_group, OUT)),
        )

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        matrix = Quantized(
            values=outputs_first(tensors["qweight"]),
            scales=tensors["scales"].T.contiguous(),
            bits=4,
            group_size=self._size(shape[1]),
            zeros=outputs_first(tensors["qzeros"]),
        )
        return QuantizedWeight(matrix=matrix, dtype=dtype)

    def _size(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size


def outputs_first(packed: torch.Tensor) -> torch.Tensor:
    """Unpack AWQ's interleaved 4-bit numbers: [R, out / 8] int32 -> [out, R] uint8."""
    pairs = as_bytes(packed.T).transpose(1, 2).contiguous()  # [out / 8, 4, R]
    outputs = pairs.new_empty((len(pairs), IN_A_NUMBER, len(packed)))
    outputs[:, ORDER[0::2]] = pairs & 15
    outputs[:, ORDER[1::2]] = pairs >> 4
    return outputs.flatten(0, 1)
