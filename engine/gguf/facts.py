"""Facts that the metadata and tensors of all architectures state, as entries of config.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.errors import ModelError
from engine.gguf.header import damaged
from engine.gguf.meta import Meta
from engine.gguf.rope import rope_scaling

Config = dict[str, Any]
MAX_CONTEXT = 1 << 24  # tables of rotary embeddings have a row for each position
LAYER = re.compile(r"blk\.(\d{1,9})\.")
STACKED = re.compile(r"blk\.\d{1,9}\.ffn_down_exps\.weight")
EXPERT = re.compile(r"blk\.0\.ffn_down\.\d{1,9}\.weight")


def common(meta: Meta) -> Config:
    """Return the entries that all architectures share."""
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    tables = meta.header.tensors
    if "token_embd.weight" not in tables:
        raise damaged(meta.header.path, "the tensor 'token_embd.weight' is missing")
    shape = tables["token_embd.weight"].shape
    if len(shape) != 2 or shape[1] != hidden:
        raise damaged(
            meta.header.path, f"token_embd.weight has shape {shape}, not rows of {hidden}"
        )
    theta = meta.real("rope.freq_base", 10_000.0)
    return {
        "vocab_size": shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers(meta),
        "intermediate_size": meta.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads(meta, heads),
        "head_dim": head_dim(meta),
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": meta.count("context_length", most=MAX_CONTEXT),
        "tie_word_embeddings": "output.weight" not in tables,
        "rope_theta": theta,
        **rope_scaling(meta, theta),
    }


def kv_heads(meta: Meta, heads: int) -> int:
    """Return the number of KV heads, which is 0 in layers without attention. Raises ``ModelError``
    if layers with attention differ."""
    key = "attention.head_count_kv"
    if not meta.has(key):
        return heads
    found = set(meta.counts(key, num_layers(meta))) - {0}
    if len(found) != 1:
        raise meta.wrong(key, sorted(found), "one number above 0, or 0 and one such number")
    return found.pop()


def num_layers(meta: Meta) -> int:
    """Return the number of layers. Raises ``ModelError`` if tensors of layers are missing."""
    stated = int(meta.count("block_count"))
    found = {int(each[1]) for each in map(LAYER.match, meta.header.tensors) if each}
    if len(found) != stated or max(found) != stated - 1:
        raise damaged(
            meta.header.path,
            f"{meta.architecture}.block_count is {stated}, it has tensors of {len(found)} layers",
        )
    return stated


def head_dim(meta: Meta) -> int:
    """Return the size of an attention head. Raises ``ModelError`` if keys and values differ."""
    size = meta.count("attention.key_length", None)
    if size is None:
        heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
        size = max(1, hidden // heads)
    values = meta.count("attention.value_length", size)
    if values != size:
        raise ModelError(
            f"{meta.header.path} has keys of {size} and values of {values} elements, which is not "
            f"supported for the architecture {meta.architecture!r}"
        )
    return int(size)


def has_tensor(meta: Meta, name: str) -> bool:
    return name in meta.header.tensors


def biases(meta: Meta) -> Config:
    """Return the entries about biases of the projections."""
    return {
        "attention_bias": has_tensor(meta, "blk.0.attn_q.bias"),
        "mlp_bias": has_tensor(meta, "blk.0.ffn_gate.bias"),
    }


def granite_factors(meta: Meta) -> Config:
    """Return the entries about the factors of Granite models."""
    return {
        "attention_multiplier": meta.real("attention.scale", 1.0),
        "embedding_multiplier": meta.real("embedding_scale", 1.0),
        "residual_multiplier": meta.real("residual_scale", 1.0),
        "logits_scaling": meta.real("logit_scale", 1.0),
    }


def partial_rotary_factor(meta: Meta) -> float:
    """Return the share of a head's dimensions that are rotated."""
    size = head_dim(meta)
    rotated = meta.count("rope.dimension_count", size)
    if rotated > size:
        raise meta.wrong("rope.dimension_count", rotated, f"at most the head size {size}")
    return float(rotated / size)


def num_experts(meta: Meta) -> int:
    """Return the number of experts. Raises ``ModelError`` if matrices of experts are missing."""
    stated = int(meta.count("expert_count"))
    stacked = [
        each.shape[0] for name, each in meta.header.tensors.items() if STACKED.fullmatch(name)
    ]
    if stacked:
        stored = stacked[0]
    else:
        stored = sum(EXPERT.fullmatch(name) is not None for name in meta.header.tensors)
    if stored != stated:
        raise damaged(
            meta.header.path,
            f"{meta.architecture}.expert_count is {stated}, its layers have {stored} experts",
        )
    return stated


def experts_per_token(meta: Meta, experts: int) -> int:
    used = int(meta.count("expert_used_count"))
    if used > experts:
        raise meta.wrong("expert_used_count", used, f"at most the {experts} experts")
    return used


def layer_types(meta: Meta, every: int) -> list[str]:
    """Return the type of attention of each layer: as the file states, or a window in all but every
    ``every``-th layer."""
    key, num = "attention.sliding_window_pattern", num_layers(meta)
    has_window = meta.flags(key, num)
    if has_window is None:
        every = meta.count(key, every)
        has_window = [(index + 1) % every != 0 for index in range(num)]
    return ["sliding_attention" if each else "full_attention" for each in has_window]


def plain(architecture: str, model_type: str) -> Callable[[Meta], Config]:
    """Return the reader of an architecture that adds nothing but biases to the common entries."""
    return lambda meta: {
        "architectures": [architecture],
        "model_type": model_type,
        **biases(meta),
    }
