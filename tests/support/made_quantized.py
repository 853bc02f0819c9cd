"""Random quantised matrices of every kind that files hold."""

from typing import NamedTuple

import torch

from kernels.quantized import Quantized


class Kind(NamedTuple):
    """What a matrix is like."""

    bits: int
    group_size: int  # 0: one group
    has_zeros: bool = False
    is_sorted: bool = False  # inputs are of any group, as activation order leaves them
    is_float: bool = False

    def __str__(self) -> str:
        words = [f"{self.bits} bits", f"groups of {self.group_size or 'all'}"]
        flags = zip(("zeros", "sorted", "float"), self[2:], strict=True)
        return " ".join(words + [name for name, is_set in flags if is_set])


KINDS = (
    Kind(4, 64, has_zeros=True),
    Kind(4, 32, is_sorted=True),
    Kind(4, 0, has_zeros=True),
    Kind(8, 64, has_zeros=True, is_sorted=True),
    Kind(8, 0),
    Kind(8, 64, is_float=True),
    Kind(8, 0, is_float=True),
)


def make(kind: Kind, num_outputs: int, num_inputs: int) -> Quantized:
    """By torch's seed. Weights are around one in size divided by the root of the inputs."""
    size, top = (num_outputs, num_inputs), (1 << kind.bits) - 1
    group_size = kind.group_size or num_inputs
    num_groups = num_inputs // group_size
    if kind.is_float:
        values, spread = torch.randn(size).to(torch.float8_e4m3fn), 1.0
    else:
        values, spread = torch.randint(top + 1, size, dtype=torch.uint8), top / 4
    scales = (0.5 + torch.rand(num_outputs, num_groups)) / spread / num_inputs**0.5
    zeros = torch.randint(top + 1, scales.shape, dtype=torch.uint8) if kind.has_zeros else None
    groups = torch.arange(num_inputs)[torch.randperm(num_inputs)] // group_size
    return Quantized(
        values=values,
        scales=scales.half(),
        bits=kind.bits,
        group_size=group_size,
        zeros=zeros,
        groups=groups if kind.is_sorted else None,
    )
