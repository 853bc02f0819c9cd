"""Makes rotary frequencies independent of the batch.

transformers' dynamic and longrope embeddings depend on the longest sequence of each call. A step
has many sequences, so the frequencies are fixed for ``max_model_len``, as for native families
(``engine.layers.rotary``).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED = "fixed"  # not a name that transformers knows


def fix_frequencies(module: nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of all rotary embeddings of a module that depend on the input's
    length."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str) and _is_dynamic(kinds) and hasattr(part, "inv_freq"):
            _fix(part, kinds, max_model_len, layer_type=None)
            part.rope_type = FIXED  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if isinstance(kind, str) and _is_dynamic(kind):
                    _fix(part, kind, max_model_len, layer_type)
                    kinds[layer_type] = FIXED


def _is_dynamic(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _fix(part: nn.Module, kind: str, max_model_len: int, layer_type: str | None) -> None:
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    scale = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
    device = getattr(part, name).device
    # Up to the trained length, both kinds have the frequencies of that length.
    init = ROPE_INIT_FUNCTIONS[kind]
    choice = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, attention_factor = init(part.config, device, seq_len=max_model_len, **choice)
    getattr(part, name).copy_(torch.as_tensor(inv_freq))
    setattr(part, scale, attention_factor)
