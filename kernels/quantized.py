"""Quantised matrices: ``Quantized`` as in checkpoints, ``Packed`` for weight-only products.

N outputs, K inputs, G groups of inputs; inputs of a group share a scale (and zero point) per
output."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch

# Maximum number of inputs multiplied in one step, by bits; the minimum is that of tensor cores.
WIDEST_PIECE = {4: 64, 8: 128}
LEAST_PIECE = 16


class Quantized(NamedTuple):
    """A quantised matrix [N, K], by groups of inputs: weight = (values - zeros) * scales + offsets.

    Codebook: the value of an element is codebook[values] instead of the stored integer."""

    values: torch.Tensor  # [N, K] uint8, or float8_e4m3fn, which has no zeros
    scales: torch.Tensor  # [N, G], any floating type; int8 if there are outer_scales
    bits: int  # 2, 3, 4, 5, 6 or 8
    group_size: int  # input k is in group k // group_size, unless `groups` is given
    zeros: torch.Tensor | None = None  # [N, G] uint8; None: see `zero`
    groups: torch.Tensor | None = None  # [K] int64, group of each input
    offsets: torch.Tensor | None = None  # [N, G], added after scaling; int8 with outer_offsets
    codebook: torch.Tensor | None = None  # [2 ** bits] int16, whole numbers from -128 to 127
    outer_scales: torch.Tensor | None = None  # [N, S] float32, factor of the scales
    outer_offsets: torch.Tensor | None = None  # [N, S] float32, factor of the offsets
    outer_size: int = 0  # inputs that share an outer scale; 0: none do

    @property
    def zero(self) -> int:
        """The zero point of every group if `zeros` is None: 0 with offsets or a codebook, else
        2 ** (bits - 1)."""
        return 0 if self.offsets is not None or self.codebook is not None else 1 << self.bits - 1

    @property
    def is_float(self) -> bool:
        return self.values.is_floating_point()

    def of_outputs(self, ids: torch.Tensor | slice) -> Quantized:
        """Returns the matrix with only the outputs ``ids`` [I], or a range of outputs."""
        chosen: dict[str, Any] = {name: part[ids] for name, part in self.by_output().items()}
        return self._replace(**chosen)

    def by_output(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that have a row for each output, by their names."""
        names = ("values", "scales", "zeros", "offsets", "outer_scales", "outer_offsets")
        return {name: part for name in names if (part := getattr(self, name)) is not None}


class Packed(NamedTuple):
    """A quantised matrix in the layout of our kernels: each row's groups are contiguous bytes.

    With 4 bits, the inputs of a row are divided into pieces of `piece` inputs. A byte stores input
    i of one piece in its low half and input i of the next piece in its high half."""

    values: torch.Tensor  # [N, K] uint8 or float8_e4m3fn; 4 bits: [N, pieces / 2 * piece] uint8
    scales: torch.Tensor  # [G, N]
    bits: int  # 4 or 8
    group_size: int
    zeros: torch.Tensor | None  # [G, N] uint8
    order: torch.Tensor | None  # [K] int32, the input of each column; None: 0, 1, 2, ...
    num_inputs: int
    piece: int  # inputs of one group that are multiplied in one step

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
        """Returns the matrix with only the outputs ``ids`` [I]."""
        zeros = None if self.zeros is None else self.zeros[:, ids]
        return self._replace(values=self.values[ids], scales=self.scales[:, ids], zeros=zeros)

    def at(self, index: int) -> Packed:
        """Returns matrix number ``index`` of the matrices joined by `stack`."""
        return self._replace(**{name: tensor[index] for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {name: one for name, one in self._asdict().items() if isinstance(one, torch.Tensor)}

    def _ordered(self) -> Packed:
        """Return the same matrix with the order of its inputs as an explicit tensor."""
        if self.order is not None:
            return self
        own = torch.arange(self.num_inputs, dtype=torch.int32, device=self.values.device)
        return self._replace(order=own)

    def _layout(self) -> tuple[object, ...]:
        """Returns everything in which two matrices must agree to be stacked."""
        tensors = {name: (one.shape, one.dtype) for name, one in self._tensors().items()}
        return tensors, self.bits, self.group_size, self.num_inputs, self.piece


def can_stack(matrices: Sequence[Packed]) -> bool:
    """True if all matrices have the same size and layout; their orders of inputs may differ."""
    layouts = [matrix._replace(order=None)._layout() for matrix in matrices]
    return all(layout == layouts[0] for layout in layouts[1:])


def stack(matrices: Sequence[Packed]) -> Packed:
    """Join matrices for which `can_stack` is true: each tensor gets a new first axis [E]."""
    if any(matrix.order is not None for matrix in matrices):
        matrices = [matrix._ordered() for matrix in matrices]
    tensors = [matrix._tensors() for matrix in matrices]
    stacked: dict[str, Any] = {
        name: torch.stack([each[name] for each in tensors]) for name in tensors[0]
    }
    return matrices[0]._replace(**stacked)


def piece_of(bits: int, group_size: int, num_groups: int) -> int:
    """Returns the number of inputs that a kernel multiplies in one step (a "piece"), all in one
    group."""
    widest = WIDEST_PIECE[bits]
    return widest if num_groups == 1 else gcd(widest, group_size)


def can_pack(matrix: Quantized) -> bool:
    """True if `pack` supports the matrix: it has 4 or 8 bits and only scales and zero points, and
    its groups have enough inputs for tensor cores and are equally large, except perhaps the
    last."""
    others = (matrix.offsets, matrix.codebook, matrix.outer_scales)
    if matrix.bits not in WIDEST_PIECE or any(other is not None for other in others):
        return False
    num_inputs, num_groups = matrix.values.shape[1], matrix.scales.shape[1]
    if piece_of(matrix.bits, matrix.group_size, num_groups) < LEAST_PIECE:
        return False
    if matrix.groups is None:
        return True
    regular = torch.arange(num_inputs) // matrix.group_size
    return torch.equal(matrix.groups.sort().values, regular)


def pack(matrix: Quantized) -> Packed:
    """Pack a matrix for weight-only products. Requires that `can_pack` is true."""
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
    """Undo `pack`, with inputs in their original order."""
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
