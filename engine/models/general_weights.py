"""Finds the parameters of transformers' modules in checkpoints with quantised weights.

Tensors that the authors of a model named otherwise get the names that transformers gives them.
Modules stack the matrices of all experts in one parameter, and those of gate and up projections in
another; checkpoints have them by expert, or stacked without joining gate and up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from engine.layers.packed_modules import is_experts
from engine.layers.quantized import GgufWeight, Weight, plain
from engine.models.checkpoint import Checkpoint, StoredTensor
from engine.models.quant.fields import Format
from engine.models.quant.modules import is_quantized
from engine.models.targets import Target, TargetPart, target, whole
from engine.models.weights import StoredWeights

OF_EXPERTS = re.compile(r"(gate_up|up|down)_proj(_bias)?")
PARTS = {
    "gate_up": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up": (("up_proj",),),
    "down": (("down_proj",), ("w2",)),
}
"""Names in checkpoints of the matrices that form one of an expert."""


class ModuleWeights:
    """The weights of transformers' module in a checkpoint, under the module's names."""

    def __init__(
        self, skeleton: nn.Module, checkpoint: Checkpoint, form: Format | None, dtype: torch.dtype
    ) -> None:
        """Match the module's parameters with the checkpoint's tensors, before any is read. Raises
        ``ModelError`` for tensors that are missing, unused or of another shape.

        skeleton: the module without data; form: the format of quantised weights, ``None`` for a
        GGUF file; dtype: of the weights that are read."""
        self._dtype = dtype
        self._shapes: dict[str, torch.Size] = {}
        self._targets: dict[str, list[Target]] = {}
        self._alternating: set[str] = set()
        self._transposed: set[str] = set()
        if form is not None:
            checkpoint.tensors = _renamed(checkpoint.tensors, skeleton)
        for name, tensor in _stored_state(skeleton, checkpoint):
            self._shapes[name] = tensor.shape
            owner, _, own = name.rpartition(".")
            module: Any = skeleton.get_submodule(owner)
            if is_experts(module) and OF_EXPERTS.fullmatch(own):
                self._targets[name] = list(_targets_of_experts(module, owner, own))
                if own.startswith("gate_up") and not module.is_concatenated:
                    self._alternating.add(name)
                if module.is_transposed and tensor.dim() == 3:
                    self._transposed.add(name)
            else:
                shape = tuple(tensor.shape)
                is_matrix = isinstance(module, Conv1D) and own == "weight"
                if is_matrix and is_quantized(owner, checkpoint.tensors):
                    shape = shape[::-1]  # formats store it as the weight of a linear layer
                    self._transposed.add(name)
                self._targets[name] = [target(name, shape, (whole(name, *shape),))]
        everything = [one for found in self._targets.values() for one in found]
        self._stored = StoredWeights(checkpoint, everything, form)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters."""
        return tuple(self._targets)

    def is_quantized(self, name: str) -> bool:
        """True if any part of a parameter is stored in quantised form."""
        return any(map(self._stored.is_quantized, self._targets[name]))

    def placeholder(self, name: str) -> torch.Tensor:
        """A tensor of a parameter's shape that takes no memory, of one repeated number."""
        return torch.zeros((), dtype=self._dtype).expand(self._shapes[name])

    def matrices(self, name: str) -> Iterator[Weight]:
        """Read the matrices [out, in] of a parameter: one, or one for each expert."""
        for one in self._targets[name]:
            weight = self._stored.load(one, self._dtype)
            if name not in self._alternating:
                yield weight
            elif name.endswith("_bias"):
                yield _alternating_rows(plain(weight).T).T.contiguous()
            else:
                yield _alternating(weight)

    def plain(self, name: str) -> torch.Tensor:
        """Read a parameter in the module's layout, dequantised."""
        shape, matrices = self._shapes[name], self.matrices(name)
        if self._targets[name][0].name == name:  # not the matrices of several experts
            only = plain(next(matrices))
            return only.T.contiguous() if name in self._transposed else only
        stacked = torch.empty(shape, dtype=self._dtype)
        for out, matrix in zip(stacked, matrices, strict=True):
            out.copy_(plain(matrix).T if name in self._transposed else plain(matrix))
        return stacked


def _renamed(tensors: Mapping[str, StoredTensor], skeleton: Any) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by the names that transformers gives them when it loads a module
    from them: it replaces parts of names, and adds the prefix of the module without its head."""
    mapping = get_model_conversion_mapping(skeleton)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    state, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    parts = dict(getattr(skeleton, prefix, nn.Module()).named_children())
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        module, _, own = name.rpartition(".")
        is_part = own != "bias" and is_quantized(module, tensors)  # of a quantised weight
        plain_name = f"{module}.weight" if is_part else name
        new = plain_name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        if new not in state and plain_name in state:
            new = plain_name
        if new not in state and new.partition(".")[0] in parts:
            new = f"{prefix}.{new}"
        if is_part:
            new = f"{new.removesuffix('.weight')}.{own}"
        found[name if new in found else new] = tensor
    return found


def _stored_state(
    skeleton: nn.Module, checkpoint: Checkpoint
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a module, tied ones once, and buffers that the checkpoint has."""
    yield from skeleton.named_parameters()
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    for name, tensor in skeleton.state_dict().items():
        if name not in parameters and name in checkpoint.tensors:
            yield name, tensor


def _targets_of_experts(module: Any, owner: str, own: str) -> Iterator[Target]:
    """A target for the matrix [out, in] of each expert; one for the biases of all experts."""
    name, shape = f"{owner}.{own}", tuple(getattr(module, own).shape)
    half, _, is_bias = own.partition("_proj")
    # A parameter in which gates and other outputs alternate is read from its two halves only.
    has_order = module.is_concatenated or half != "gate_up"
    num_experts, *matrix = shape
    if is_bias:
        ways = [_halves_of_biases(owner, parts, shape) for parts in PARTS[half]]
        yield target(name, shape, *ways, *([(whole(name, *shape),)] if has_order else []))
        return
    outputs, inputs = reversed(matrix) if module.is_transposed else matrix
    for expert in range(num_experts):
        ways = []
        for parts in PARTS[half]:
            one = (outputs // len(parts), inputs)
            ways.append(tuple(whole(f"{owner}.{expert}.{p}.weight", *one) for p in parts))
            ways.append(
                tuple(_range(f"{owner}.{p}.weight", (num_experts, *one), expert) for p in parts)
            )
        if has_order and not module.is_transposed:
            ways.append((_range(name, shape, expert),))
        yield target(f"{name}.{expert}", (outputs, inputs), *ways)


def _halves_of_biases(
    owner: str, parts: tuple[str, ...], shape: tuple[int, ...]
) -> tuple[TargetPart, ...]:
    """Ranges of biases that are stacked without joining gate and up. shape: [experts, out]."""
    one = (shape[0], shape[1] // len(parts))
    return tuple(
        _range(f"{owner}.{p}.bias", one, expert) for expert in range(shape[0]) for p in parts
    )


def _range(name: str, shape: tuple[int, ...], expert: int) -> TargetPart:
    """The range of one expert in a tensor of this shape that stacks those of all experts."""
    size = prod(shape[1:])
    return TargetPart(name, shape, expert * size, size)


def _alternating(weight: Weight) -> Weight:
    """Reorder outputs [2 x N, in], N gates and N others, so that gates and others alternate."""
    if isinstance(weight, GgufWeight):
        return replace(weight, rows=_alternating_rows(weight.rows))
    return _alternating_rows(plain(weight))


def _alternating_rows(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)
