"""MXFP4 checkpoints as OpenAI publishes them: the experts of gpt-oss in 4-bit floats.

A tensor [experts, out, in] is stored as NAME_blocks [experts, out, in / 32, 16] uint8, two elements
per byte, the lower bits first, and NAME_scales [experts, out, in / 32] uint8, exponents of two plus
127. The module of transformers has it as NAME [experts, in, out]. All other tensors are plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelError
from engine.layers.quantized import QuantizedWeight
from engine.models.checkpoint import DTYPES, Checkpoint
from engine.models.quant.fields import FIXED, OUT, Axis, Field
from kernels.quantized import Quantized

BLOCKS, SCALES = "_blocks", "_scales"
GROUP_SIZE = 32
BYTE = ("U8",)
# Twice the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of the format, and the same negated.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# Scale by stored exponent: 2 ** (exponent - 127), halved for the doubled values.
POWERS = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)]).bfloat16()


@dataclass(frozen=True)
class Mxfp4:
    """The MXFP4 format of one matrix [out, in]."""

    name: str = "mxfp4"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Mxfp4:
        """Make the format. Its lists of exceptions are not needed, and it has no other options."""
        return cls()

    def fields(self, module: str, shape: tuple[int, int]) -> tuple[Field, ...]:
        outputs, inputs = shape
        groups, by_group = inputs // GROUP_SIZE, Axis(1, GROUP_SIZE)
        blocks = (outputs, groups, GROUP_SIZE // 2)
        return (
            Field(("blocks",), (blocks,), BYTE, axes=(OUT, by_group, FIXED)),
            Field(("scales",), ((outputs, groups),), BYTE, axes=(OUT, by_group)),
        )

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        blocks = tensors["blocks"]
        values = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(shape)
        matrix = Quantized(
            values=values,
            # bfloat16 has the range of the exponents, and powers of two are exact.
            scales=POWERS[tensors["scales"].long()],
            bits=4,
            group_size=GROUP_SIZE,
            codebook=torch.tensor(DOUBLED, dtype=torch.int16),
        )
        return QuantizedWeight(matrix=matrix, dtype=dtype)


class StackedExperts:
    """The stacked matrices of experts in a checkpoint. Each matrix is read by itself."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises ``ModelError`` for tensors that do not belong together."""
        self._checkpoint = checkpoint
        self._form = Mxfp4()
        stored = checkpoint.tensors
        found = [name for name in stored if name.endswith(BLOCKS)]
        self.names = tuple(name.removesuffix(BLOCKS) for name in found)
        """Names of the stacked matrices in transformers' module."""
        for name in self.names:
            self._check(name)
        tensors = {f"{name}{suffix}" for name in self.names for suffix in (BLOCKS, SCALES)}
        self.plain = tuple(name for name in stored if name not in tensors)
        """Names of all other tensors."""

    def placeholder(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [experts, in, out] that takes no memory, of one repeated number."""
        experts, (outputs, inputs) = self._num_experts(name), self._shape(name)
        return torch.zeros((), dtype=dtype).expand(experts, inputs, outputs)

    def matrices(self, name: str, dtype: torch.dtype) -> Iterator[QuantizedWeight]:
        """Read the matrix [out, in] of each expert."""
        for expert in range(self._num_experts(name)):
            tensors = {
                "blocks": self._checkpoint.entry(f"{name}{BLOCKS}", expert),
                "scales": self._checkpoint.entry(f"{name}{SCALES}", expert),
            }
            yield self._form.weight(name, self._shape(name), tensors, dtype)

    def dequantized(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read all matrices as a plain tensor [experts, in, out]."""
        outputs, inputs = self._shape(name)
        stacked = torch.empty((self._num_experts(name), inputs, outputs), dtype=dtype)
        for one, weight in zip(stacked, self.matrices(name, dtype), strict=True):
            one.copy_(weight.dequantize().T)
        return stacked

    def _num_experts(self, name: str) -> int:
        return self._checkpoint.tensors[f"{name}{BLOCKS}"].shape[0]

    def _shape(self, name: str) -> tuple[int, int]:
        _, outputs, groups, _ = self._checkpoint.tensors[f"{name}{BLOCKS}"].shape
        return outputs, groups * GROUP_SIZE

    def _check(self, name: str) -> None:
        blocks = self._checkpoint.tensors[f"{name}{BLOCKS}"]
        scales = self._checkpoint.tensors.get(f"{name}{SCALES}")
        if scales is None:
            raise ModelError(
                f"{self._checkpoint.root} has the tensor {name}{BLOCKS} but lacks {name}{SCALES}; "
                "its files are incomplete"
            )
        wanted = len(blocks.shape) == 4 and blocks.shape[3] == GROUP_SIZE // 2
        if not wanted or blocks.dtype not in BYTE:
            raise ModelError(
                f"{name}{BLOCKS} in {blocks.file} has shape {blocks.shape} and type "
                f"{blocks.dtype}, must be [experts, outputs, inputs / 32, 16] of U8"
            )
        if scales.shape != blocks.shape[:3] or scales.dtype not in BYTE:
            raise ModelError(
                f"{name}{SCALES} in {scales.file} has shape {scales.shape} and type "
                f"{scales.dtype}, must be {blocks.shape[:3]} of U8, as {name}{BLOCKS} implies"
            )


def plain_tensors(experts: StackedExperts, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Read the tensors that are not quantised, floats as ``dtype``, by name."""
    found = {}
    for name in experts.plain:
        stored = checkpoint.tensors[name]
        if stored.dtype not in DTYPES:
            raise ModelError(
                f"{name} in {stored.file} is of type {stored.dtype}; only the experts may be "
                "quantized"
            )
        found[name] = torch.empty(stored.shape, dtype=dtype)
        checkpoint.read(name, 0, found[name])
    return found
