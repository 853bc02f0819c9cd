"""Loads transformers' modules whose weights are stored in quantised form.

On a CPU the weights of linear layers, experts and embeddings keep this form. All others, and all
weights on a GPU, are dequantised."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.config.model import ModelInfo
from engine.layers.linear import is_cpu, make_linear
from engine.layers.packed_modules import (
    can_read_rows,
    is_experts,
    owners_of_parameters,
    pack_stored_experts,
    read_rows,
    use_product,
)
from engine.models.assemble import activation_dtype
from engine.models.general_support import causal_class
from engine.models.general_weights import ModuleWeights
from engine.models.opening import open_checkpoint
from engine.models.quant import format_of

LINEAR = (nn.Linear, Conv1D)


def load_stored(
    info: ModelInfo,
    hf: PreTrainedConfig,
    device: str,
    options: dict[str, Any],
    *,
    quantize_activations: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the module of a GGUF file or of a directory with quantised weights; also returns
    transformers' report on missing tensors.

    options: arguments of ``from_pretrained``, among them config and dtype; quantize_activations: as
    for ``make_linear``. Raises ``ModelError`` for damaged files and for tensors that are missing,
    unused or of a wrong shape."""
    for stated in ("quantization_config", "compression_config"):
        if hasattr(hf, stated):  # otherwise transformers would quantise the module itself
            delattr(hf, stated)
    dtype, cls = options["dtype"], causal_class(hf)
    with torch.device("meta"):
        skeleton = cls(hf)
    with open_checkpoint(info.path) as checkpoint:
        weights = ModuleWeights(skeleton, checkpoint, format_of(info), dtype)
        packed = packed_names(skeleton, weights) if is_cpu(torch.device(device)) else []
        state = {
            name: weights.placeholder(name) if name in packed else weights.plain(name)
            for name in weights.names
        }
        causal, report = cls.from_pretrained(None, state_dict=state, **options)
        del state
        if not report["missing_keys"]:
            make = partial(make_linear, quantize_activations=quantize_activations)
            _Packing(causal, weights, make, activation_dtype(dtype, device)).pack(packed)
    return causal, report


def packed_names(skeleton: nn.Module, weights: ModuleWeights) -> list[str]:
    """Names of the parameters that keep their quantised form: weights of linear layers and
    embeddings, and both stacked weights of an experts module if one of them is quantised."""
    found = []
    for name in weights.names:
        owner, _, own = name.rpartition(".")
        module = skeleton.get_submodule(owner)
        alike = [name]
        if is_experts(module):
            stacks = [each for each, tensor in module.named_parameters() if tensor.dim() == 3]
            alike = [f"{owner}.{each}" for each in stacks]
        elif own != "weight" or not (type(module) in LINEAR or isinstance(module, nn.Embedding)):
            continue
        if name in alike and any(map(weights.is_quantized, alike)):
            found.append(name)
    return found


class _Packing:
    """Gives the modules of a model their stored weights, which are read one at a time."""

    def __init__(
        self,
        causal: PreTrainedModel,
        weights: ModuleWeights,
        make: Any,
        dtype: torch.dtype,
    ) -> None:
        """make: ``make_linear`` with its options; dtype: of activations."""
        self._causal = causal
        self._weights = weights
        self._make = make
        self._dtype = dtype
        self._head = causal.get_output_embeddings()

    def pack(self, names: list[str]) -> None:
        """Replace the placeholders of these parameters."""
        owners = owners_of_parameters(self._causal)
        experts: dict[str, dict[str, Iterator[Any]]] = {}
        for name in names:
            owner, _, own = name.rpartition(".")
            if is_experts(self._causal.get_submodule(owner)):
                experts.setdefault(owner, {})[own] = self._weights.matrices(name)
            else:
                self._pack_one(name, owners[id(self._causal.get_parameter(name))])
        for owner, matrices in experts.items():
            pack_stored_experts(self._causal.get_submodule(owner), matrices, self._make)

    def _pack_one(self, name: str, modules: list[nn.Module]) -> None:
        """Give one weight to the modules that share it: embeddings and at most one layer."""
        layers: list[Any] = [module for module in modules if type(module) in LINEAR]
        tables = [module for module in modules if type(module) not in LINEAR]
        if len(layers) > 1 or not all(can_read_rows(table, self._dtype) for table in tables):
            self._causal.get_parameter(name).data = self._weights.plain(name)
            return
        layer = layers[0] if layers else None
        bias = None if layer is None or layer.bias is None else layer.bias.detach()
        weight = next(self._weights.matrices(name))
        product = self._make(weight, bias, keeps_float32=layer is self._head)
        if layer is not None:
            use_product(layer, product)
        for table in tables:
            read_rows(table, product.rows, self._dtype)
