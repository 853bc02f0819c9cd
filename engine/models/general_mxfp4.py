"""Loads transformers' modules whose experts are stored in MXFP4."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.config.model import ModelInfo
from engine.errors import ModelError
from engine.layers.linear import is_cpu, make_linear
from engine.layers.packed_modules import pack_stored_experts
from engine.layers.quantized import QuantizedWeight
from engine.models.checkpoint import Checkpoint
from engine.models.general_support import causal_class
from engine.models.quant.mxfp4 import StackedExperts, plain_tensors


def load_mxfp4(
    info: ModelInfo,
    hf: PreTrainedConfig,
    device: str,
    options: dict[str, Any],
    *,
    quantize_activations: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the module of a directory; also returns transformers' report on missing tensors.

    On a CPU the experts stay in 4 bits, on a GPU they are dequantised. options: arguments of
    ``from_pretrained``, among them config and dtype; quantize_activations: as for ``make_linear``.
    Raises ``ModelError`` for damaged files."""
    dtype, keeps_packed = options["dtype"], is_cpu(torch.device(device))
    # Otherwise transformers would quantise the module itself.
    del hf.quantization_config
    with Checkpoint(info.path) as checkpoint:
        experts = StackedExperts(checkpoint)
        read = experts.placeholder if keeps_packed else experts.dequantized
        state = plain_tensors(experts, checkpoint, dtype)
        state |= {name: read(name, dtype) for name in experts.names}
        causal, report = causal_class(hf).from_pretrained(
            None, state_dict=state, ignore_mismatched_sizes=True, **options
        )
        if report["unexpected_keys"]:
            unused = ", ".join(sorted(report["unexpected_keys"])[:5])
            raise ModelError(f"{info.path} has tensors that its model does not use: {unused}")
        is_whole = not report["missing_keys"] and not report["mismatched_keys"]
        if keeps_packed and is_whole:
            _pack(causal, experts, dtype, quantize_activations)
    return causal, report


def _pack(
    causal: PreTrainedModel, experts: StackedExperts, dtype: torch.dtype, quantizes: bool
) -> None:
    """Make the experts of a module use our kernels, with the stored matrices."""
    weights: dict[str, dict[str, Iterator[QuantizedWeight]]] = {}
    for name in experts.names:
        module, _, own = name.rpartition(".")
        weights.setdefault(module, {})[own] = experts.matrices(name, dtype)
    for module, matrices in weights.items():
        make = partial(make_linear, quantize_activations=quantizes)
        pack_stored_experts(causal.get_submodule(module), matrices, make)
