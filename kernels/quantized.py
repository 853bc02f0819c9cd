"""Quantised matrices: one form for what files hold, another for what weight-only products read.

N outputs, K inputs, G groups of inputs; inputs of a group share a scale (and a zero) per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch

# Inputs multiplied at a time at most, by bits; and at least, which is what tensor cores take.
WIDEST_PIECE = {4: 64, 8: 128}
LEAST_PIECE = 16


class Quantized(NamedTuple):
    """weight[n, k] = (values[n, k] - zeros[n, g]) * scales[n, g], with g the group of input k."""

    values: torch.Tensor  # [N, K] uint8, or float8_e4m3fn, which has no zeros
    scales: torch.Tensor  # [N, G], any floating type
    bits: int  # 4 or 8
    group_size: int  # input k is of group k // group_size, if `groups` does not say otherwise
    zeros: torch.Tensor | None = None  # [N, G] uint8; None: half of the range, 2 ** (bits - 1)
    groups: torch.Tensor | None = None  # [K] int64

    @property
    def is_float(self) -> bool:
        return self.values.is_floating_point()


class Packed(NamedTuple):
    """A matrix as weight-only products read it: rows of bytes, groups side by side.

    Of 4 bits, byte i * piece + j of a row holds input 2 * i * piece + j in its low half and the
    input `piece` later in its high half: a program takes both without moving numbers between lanes.
    """

    values: torch.Tensor  # [N, K] uint8 or float8_e4m3fn; of 4 bits [N, pieces / 2 * piece] uint8
    scales: torch.Tensor  # [G, N]
    bits: int
    group_size: int
    zeros: torch.Tensor | None  # [G, N] uint8
    order: torch.Tensor | None  # [K] int32: the input that each column belongs to; None: its own
    num_inputs: int
    piece: int  # inputs that lie in one group and are multiplied together

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]

    def to(self, device: torch.device | str) -> Packed:
        """A copy on a device."""
        return self._replace(
            values=self.values.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def of_outputs(self, ids: torch.Tensor) -> Packed:
        """The matrix of some outputs: [I] -> I outputs."""
        zeros = None if self.zeros is None else self.zeros[:, ids]
        return self._replace(values=self.values[ids], scales=self.scales[:, ids], zeros=zeros)

    def at(self, index: int) -> Packed:
        """One of the matrices that `stack` has put together."""
        return self._replace(**{name: tensor[index] for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {name: one for name, one in self._asdict().items() if isinstance(one, torch.Tensor)}

    def _ordered(self) -> Packed:
        """The weight with an explicit order."""
        if self.order is not None:
            return self
        own = torch.arange(self.num_inputs, dtype=torch.int32, device=self.values.device)
        return self._replace(order=own)

    def _form(self) -> tuple[object, ...]:
        """What matrices have in common that can be put together."""
        tensors = {name: (one.shape, one.dtype) for name, one in self._tensors().items()}
        return tensors, self.bits, self.group_size, self.num_inputs, self.piece


def can_stack(matrices: Sequence[Packed]) -> bool:
    """Whether they are of one size, packed alike but for the order of their inputs."""
    forms = [matrix._replace(order=None)._form() for matrix in matrices]
    return all(form == forms[0] for form in forms[1:])


def stack(matrices: Sequence[Packed]) -> Packed:
    """Matrices in one: each of its tensors has an axis [E] before its own. See `can_stack`."""
    if any(matrix.order is not None for matrix in matrices):
        matrices = [matrix._ordered() for matrix in matrices]
    tensors = [matrix._tensors() for matrix in matrices]
    stacked: dict[str, Any] = {
        name: torch.stack([each[name] for each in tensors]) for name in tensors[0]
    }
    return matrices[0]._replace(**stacked)


def piece_of(bits: int, group_size: int, num_groups: int) -> int:
    """Inputs multiplied together: they must be of one group."""
    widest = WIDEST_PIECE[bits]
    return widest if num_groups == 1 else gcd(widest, group_size)


def can_pack(matrix: Quantized) -> bool:
    """Whether groups are wide enough and, once inputs are sorted by group, all of one size."""
    num_inputs, num_groups = matrix.values.shape[1], matrix.scales.shape[1]
    if piece_of(matrix.bits, matrix.group_size, num_groups) < LEAST_PIECE:
        return False
    if matrix.groups is None:
        return True
    regular = torch.arange(num_inputs) // matrix.group_size
    return torch.equal(matrix.groups.sort().values, regular)


def pack(matrix: Quantized) -> Packed:
    """For products on a device; `can_pack` must hold."""
    values, order = matrix.values, None
    if matrix.groups is not None:
        order = matrix.groups.argsort(stable=True)
        values, order = values.view(torch.uint8)[:, order].view(values.dtype), order.int()
    piece = piece_of(matrix.bits, matrix.group_size, matrix.scales.shape[1])
    return Packed(
        values=_pack_halves(values, piece) if matrix.bits == 4 else values.contiguous(),
        scales=matrix.scales.T.contiguous(),
        bits=matrix.bits,
        group_size=matrix.group_size,
        zeros=None if matrix.zeros is None else matrix.zeros.T.contiguous(),
        order=order,
        num_inputs=values.shape[1],
        piece=piece,
    )


def _pack_halves(values: torch.Tensor, piece: int) -> torch.Tensor:
    padding = -values.shape[1] % (2 * piece)
    pairs = torch.nn.functional.pad(values, (0, padding)).view(len(values), -1, 2, piece)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def unpack(packed: Packed) -> Quantized:
    """Back to the form of files, inputs in their places."""
    values, groups = packed.values, None
    if packed.bits == 4:
        bytes_ = values.view(len(values), -1, 1, packed.piece)
        halves = torch.cat((bytes_ & 15, bytes_ >> 4), dim=2)
        values = halves.flatten(1)[:, : packed.num_inputs]
    if packed.order is not None:
        back = packed.order.long().argsort()
        values = values.view(torch.uint8)[:, back].view(values.dtype)
        groups = back // packed.group_size
    return Quantized(
        values=values,
        scales=packed.scales.T,
        bits=packed.bits,
        group_size=packed.group_size,
        zeros=None if packed.zeros is None else packed.zeros.T,
        groups=groups,
    )
