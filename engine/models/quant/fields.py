"""Common parts of the formats: stored tensors, packed integers, options of a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple, Protocol

import torch

from engine.errors import ModelError
from engine.layers.quantized import QuantizedWeight
from kernels.quantized import Quantized

Shape = tuple[int, ...]
INTEGERS = ("I32",)
SCALES = ("F16", "BF16", "F32")


class Axis(NamedTuple):
    """What an axis of a stored tensor is: ``entries`` entries for each ``per`` outputs (``dim`` 0)
    or inputs (``dim`` 1) of the matrix. An axis with a single entry has it for all of them."""

    dim: int
    per: int = 1
    entries: int = 1


OUT, IN = Axis(0), Axis(1)
FIXED = Axis(-1)  # has nothing to do with outputs and inputs


class Field(NamedTuple):
    """One of the tensors that store a module's weight."""

    suffixes: tuple[str, ...]  # accepted names; the first is the key in ``Format.weight``
    shapes: tuple[Shape, ...]  # accepted shapes
    dtypes: tuple[str, ...]  # accepted types, by their names in safetensors
    is_optional: bool = False
    axes: tuple[Axis, ...] = ()  # of the first shape; of others as many as they have


def units(fields: Iterable[Field]) -> tuple[int, int]:
    """Numbers of adjacent outputs, and inputs, that share a scale or are packed together."""
    axes = [axis for field in fields for axis in field.axes]
    outputs, inputs = (lcm(*(axis.per for axis in axes if axis.dim == dim)) for dim in (0, 1))
    return outputs, inputs


class Region(NamedTuple):
    """Some outputs and inputs of a matrix."""

    rows: range
    columns: range

    def around(self, fields: Sequence[Field], shape: tuple[int, int]) -> Region:
        """The smallest region with this one whose numbers are stored in whole entries. shape: of
        the matrix."""
        wide = [
            range(part.start // unit * unit, min(-(-part.stop // unit) * unit, size))
            for part, unit, size in zip(self, units(fields), shape, strict=True)
        ]
        return Region(*wide)

    def of(self, axes: Sequence[Axis], shape: Shape) -> tuple[range, ...]:
        """The entries of a stored tensor along each of its axes. shape: of the tensor."""
        found = []
        for axis, size in zip(axes, shape, strict=False):
            part = range(size)
            if axis.dim >= 0 and size > 1:
                mine = self[axis.dim]
                first = mine.start // axis.per * axis.entries
                part = range(first, min(-(-mine.stop // axis.per) * axis.entries, size))
            found.append(part)
        return tuple(found) or tuple(range(size) for size in shape)


class Format(Protocol):
    """A format in which checkpoints store quantised weights [out, in] of linear modules."""

    @property
    def name(self) -> str:
        """The format's name: the value of quant_method in config.json."""
        ...

    def fields(self, module: str, shape: tuple[int, int]) -> Sequence[Field]:
        """The tensors that store a module's weight of shape [out, in]. Raises ``ModelError`` if the
        format does not allow this shape."""
        ...

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        """Make a module's weight from its tensors, by name suffix (``suffixes[0]`` of a field)."""
        ...


def field_of(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The value of the first of these keys that is in the config and not null; else the default."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def choose(what: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return ``value``. Raises ``ModelError`` with name ``what`` if it is not in ``choices``."""
    if value not in choices:
        allowed = ", ".join(map(str, choices))
        raise ModelError(f"its quantization has {what} {value!r}, supported: {allowed}")
    return value


def size_of_group(value: Any) -> int:
    """Return a group size: a number of inputs, or -1 for all. Raises ``ModelError`` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value >= 1):
        raise ModelError(f"its quantization has group_size {value!r}, must be -1 or at least 1")
    return value


def num_groups(module: str, num_inputs: int, group_size: int) -> int:
    """Number of groups of a module's inputs. Raises ``ModelError`` if a group is incomplete."""
    if num_inputs % group_size:
        raise ModelError(
            f"{module} has {num_inputs} inputs, not a multiple of its quantization's group_size "
            f"{group_size}"
        )
    return num_inputs // group_size


def group_axis(group_size: int, num_inputs: int) -> Axis:
    """The axis of groups of inputs. group_size: of inputs that share a scale; if it is -1 or as
    many as there are, all do, and each part of them may use it."""
    return FIXED if group_size in (-1, num_inputs) else Axis(1, group_size)


def check_multiple(module: str, what: str, size: int, of: int) -> None:
    if size % of:
        raise ModelError(
            f"{module} has {size} {what}, not a multiple of {of}, which are packed together"
        )


def as_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Copy the bytes of integers: [R, C] int32 -> [R, C, 4] uint8, the lowest bits first."""
    # contiguous() keeps the strides of a single column; this copy does not.
    copied = packed.clone(memory_format=torch.contiguous_format)
    return copied.view(torch.uint8).view(*packed.shape, 4)


def unpack_integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack integers of 2, 3, 4 or 8 bits, the lowest bits first: [R, C] int32 ->
    [R, C * 32 / bits] uint8. An integer of 3 bits may begin in one int32 and end in the next."""
    values = as_bytes(packed).flatten(1)
    if bits == 8:
        return values
    if bits == 4:
        return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    # Eight integers fill as many bytes as an integer has bits.
    parts = values.view(len(values), -1, bits).int()
    eights = sum((parts[..., byte] << 8 * byte for byte in range(bits)), torch.tensor(0))
    mask = (1 << bits) - 1
    found = [(eights >> bits * place & mask).to(torch.uint8) for place in range(8)]
    return torch.stack(found, dim=-1).flatten(1)


def by_output(scales: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Return scales as [out, 1]; ``scales`` has one for all outputs or one for each."""
    return scales.reshape(-1, 1).expand(num_outputs, 1).contiguous()


def by_block(scales: torch.Tensor, rows: int, num_outputs: int) -> torch.Tensor:
    """Return scales [out, G], one row per output, from scales with one row for each block of
    ``rows`` outputs."""
    return scales.repeat_interleave(rows, dim=0)[:num_outputs].contiguous()


def check_groups(module: str, matrix: Quantized) -> Quantized:
    """Return the matrix. Raises ``ModelError`` if an input is in a group that has no scale."""
    groups, count = matrix.groups, matrix.scales.shape[1]
    if groups is not None and not bool(((groups >= 0) & (groups < count)).all()):
        raise ModelError(
            f"{module} assigns inputs to groups {int(groups.min())} to {int(groups.max())}, but "
            f"has scales for {count} groups; its files are damaged"
        )
    return matrix
