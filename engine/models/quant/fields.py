"""What formats share: the tensors that hold a weight, packed integers, values of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from engine.errors import ModelError
from engine.layers.quantized import QuantizedWeight
from kernels.quantized import Quantized

Shape = tuple[int, ...]
INTEGERS = ("I32",)
SCALES = ("F16", "BF16", "F32")


class Field(NamedTuple):
    """A tensor among those that hold a module's weight."""

    suffixes: tuple[str, ...]  # the names it goes by; the first is the format's word for it
    shapes: tuple[Shape, ...]  # any of them
    dtypes: tuple[str, ...]  # as safetensors names them
    is_optional: bool = False


class Format(Protocol):
    """A way to store weights [out, in] of linear modules."""

    @property
    def name(self) -> str:
        """The name in quant_method."""
        ...

    def fields(self, module: str, shape: tuple[int, int]) -> Sequence[Field]:
        """The tensors that hold a module's weight. Raises ``ModelError`` if none can."""
        ...

    def weight(
        self,
        module: str,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> QuantizedWeight:
        """What they stand for; ``tensors`` by the first suffix of their fields."""
        ...


def field_of(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """The first of some keys that a config gives a value."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def choose(what: str, value: Any, choices: Sequence[Any]) -> Any:
    """The value, if it is one that is read."""
    if value not in choices:
        allowed = ", ".join(map(str, choices))
        raise ModelError(f"its quantization has {what} {value!r}, supported: {allowed}")
    return value


def size_of_group(value: Any) -> int:
    """-1 for whole rows, else a number of inputs."""
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value >= 1):
        raise ModelError(f"its quantization has group_size {value!r}, must be -1 or at least 1")
    return value


def num_groups(module: str, num_inputs: int, group_size: int) -> int:
    """Groups of a row. Raises ``ModelError`` if the last would not be whole."""
    if num_inputs % group_size:
        raise ModelError(
            f"{module} has {num_inputs} inputs, no multiple of the group_size {group_size} that "
            "its quantization states"
        )
    return num_inputs // group_size


def check_multiple(module: str, what: str, size: int, of: int) -> None:
    if size % of:
        raise ModelError(f"{module} has {size} {what}, no multiple of the {of} packed in a number")


def as_bytes(packed: torch.Tensor) -> torch.Tensor:
    """[R, C] int32 -> a new [R, C, 4] uint8, the lowest bits first."""
    # A column counts as contiguous however its rows lie; a copy lies as it should.
    copied = packed.clone(memory_format=torch.contiguous_format)
    return copied.view(torch.uint8).view(*packed.shape, 4)


def unpack_integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, C] int32, the lowest bits first -> [R, C * 32 / bits] uint8."""
    values = as_bytes(packed).flatten(1)
    if bits == 8:
        return values
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)


def by_output(scales: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """A scale of all, or of each output: [out, 1]."""
    return scales.reshape(-1, 1).expand(num_outputs, 1).contiguous()


def by_block(scales: torch.Tensor, rows: int, num_outputs: int) -> torch.Tensor:
    """Scales of blocks of ``rows`` outputs, written out for each output: [out, G]."""
    return scales.repeat_interleave(rows, dim=0)[:num_outputs].contiguous()


def check_groups(module: str, matrix: Quantized) -> Quantized:
    """The matrix, if every input is of a group that has a scale."""
    groups, count = matrix.groups, matrix.scales.shape[1]
    if groups is not None and not bool(((groups >= 0) & (groups < count)).all()):
        raise ModelError(
            f"{module} sorts inputs into groups {int(groups.min())} to {int(groups.max())}, but "
            f"has scales of {count}; its files are damaged"
        )
    return matrix
