"""Finds, checks and reads the quantised modules of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from engine.errors import ModelError
from engine.layers.quantized import StoredWeight, columns_of
from engine.models.checkpoint import Checkpoint, StoredTensor
from engine.models.quant.fields import Field, Format, Region, units
from engine.models.targets import TargetPart

# A module is quantised if it has one of these tensors, whatever its config.json lists.
PACKED_NAMES = ("qweight", "weight_packed")
PACKED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
# Unused: scales of activations, which are not quantised here; scales of the KV cache, which
# engine.models.kv_scales reads; shapes of packed weights, which config.json implies.
UNUSED = re.compile(r"\.((k|v|q|kv|input|output|activation|prob)_(scale|zero_point)|weight_shape)$")


def is_quantized(module: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """True if a module's weight is stored in a quantised form."""
    stored = tensors.get(f"{module}.weight")
    if stored is not None:
        return stored.dtype in PACKED_DTYPES
    return any(f"{module}.{name}" in tensors for name in PACKED_NAMES)


class QuantizedModules:
    """Reads the quantised weights of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, form: Format) -> None:
        self._checkpoint = checkpoint
        self._form = form

    def holds(self, part: TargetPart) -> bool:
        """True if ``part`` is the weight of a module that the checkpoint stores quantised."""
        return part.name.endswith(".weight") and is_quantized(
            module_of(part), self._checkpoint.tensors
        )

    def tensors(self, part: TargetPart) -> dict[str, str]:
        """Return the names of the checkpoint tensors that store a quantised weight, by suffix, such
        as ``qweight``. Raises ``ModelError`` if one is missing or has a wrong shape or type."""
        module, found = module_of(part), {}
        for field in self._form.fields(module, matrix_shape(part)):
            name = self._find(module, field)
            if name is not None:
                found[field.suffixes[0]] = name
        return found

    def read(self, part: TargetPart, rows: range, dtype: torch.dtype) -> StoredWeight:
        """Read some rows of a module, and of these the columns of ``part``. They are dequantised if
        the columns cut a group of inputs."""
        module, shape = module_of(part), matrix_shape(part)
        fields, names = self._form.fields(module, shape), self.tensors(part)
        region = Region(rows, part.columns or range(shape[1]))
        wide = region.around(fields, shape)
        tensors = {
            suffix: self._checkpoint.entries(
                names[suffix], wide.of(field.axes, self._checkpoint.tensors[names[suffix]].shape)
            )
            for field in fields
            if (suffix := field.suffixes[0]) in names
        }
        size = len(wide.rows), len(wide.columns)
        weight = self._form.weight(module, size, tensors, dtype)
        weight = weight.rows(rows.start - wide.rows.start, len(rows))
        first = wide.columns.start
        own = range(region.columns.start - first, region.columns.stop - first)
        return weight if region.columns == wide.columns else columns_of(weight, own)

    def column_unit(self, part: TargetPart) -> int:
        """Number of adjacent inputs that share a scale or are packed together."""
        return units(self._form.fields(module_of(part), matrix_shape(part)))[1]

    def may_be_left(self, name: str) -> bool:
        """True if the model need not use a tensor: it is no part of a weight, or it is a bias of
        zeros, as AutoGPTQ adds to every module."""
        module, _, last = name.rpartition(".")
        if last == "bias" and is_quantized(module, self._checkpoint.tensors):
            return not self._checkpoint.tensor(name).any()
        return UNUSED.search(name) is not None

    def _find(self, module: str, field: Field) -> str | None:
        tensors = self._checkpoint.tensors
        names = [f"{module}.{suffix}" for suffix in field.suffixes]
        name = next((name for name in names if name in tensors), None)
        if name is not None:
            self._check(name, tensors[name], field)
        elif not field.is_optional:
            shapes = " or ".join(map(str, field.shapes))
            raise ModelError(
                f"{self._checkpoint.root} lacks the tensor {' or '.join(names)} of shape {shapes}, "
                f"part of a weight in {self._form.name} format; its files are incomplete or do not "
                "belong to its config.json"
            )
        return name

    def _check(self, name: str, stored: StoredTensor, field: Field) -> None:
        if stored.dtype not in field.dtypes:
            raise ModelError(
                f"{name} in {stored.file} is of type {stored.dtype}, {self._form.name} format has "
                f"{' or '.join(field.dtypes)} there; config.json's quantization_config does not "
                "belong to these files"
            )
        if stored.shape not in field.shapes:
            implied = " or ".join(map(str, field.shapes))
            raise ModelError(
                f"{name} in {stored.file} has shape {stored.shape}; config.json, with the bits and "
                f"group size of its quantization_config, implies {implied}"
            )


def module_of(part: TargetPart) -> str:
    return part.name.removesuffix(".weight")


def matrix_shape(part: TargetPart) -> tuple[int, int]:
    outputs, inputs = part.shape
    return outputs, inputs
