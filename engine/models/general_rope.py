"""Rotary frequencies that do not move with the batch.

transformers' dynamic and longrope embeddings look at the longest sequence of each call. A step
holds many sequences, so one choice is made for all, by ``max_model_len``, as for native families
(``engine.layers.rotary``).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED = "fixed"  # none of the names that transformers looks for


def fix_frequencies(module: nn.Module, max_model_len: int) -> None:
    """Settle every rotary embedding of a module that would follow the length of its input."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str) and _moves(kinds) and hasattr(part, "inv_freq"):
            _fix(part, kinds, max_model_len, layer_type=None)
            part.rope_type = FIXED  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if isinstance(kind, str) and _moves(kind):
                    _fix(part, kind, max_model_len, layer_type)
                    kinds[layer_type] = FIXED


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _fix(part: nn.Module, kind: str, max_model_len: int, layer_type: str | None) -> None:
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    scale = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
    device = getattr(part, name).device
    # Below the trained length both kinds are what they are at that length.
    init = ROPE_INIT_FUNCTIONS[kind]
    choice = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, attention_factor = init(part.config, device, seq_len=max_model_len, **choice)
    getattr(part, name).copy_(torch.as_tensor(inv_freq))
    setattr(part, scale, attention_factor)
