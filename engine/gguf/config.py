"""Builds the config.json of a GGUF file from its metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ModelError
from engine.gguf.facts import (
    biases,
    common,
    experts_per_token,
    granite_factors,
    has_tensor,
    head_dim,
    layer_types,
    num_experts,
    num_layers,
    partial_rotary_factor,
    plain,
)
from engine.gguf.general import GENERAL, olmo3
from engine.gguf.header import GgufHeader
from engine.gguf.meta import Meta

Config = dict[str, Any]


def llama(meta: Meta) -> Config:
    if not meta.count("expert_count", 0, least=0):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **biases(meta)}
    experts = num_experts(meta)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": experts_per_token(meta, experts),
    }


def qwen3_moe(meta: Meta) -> Config:
    experts = num_experts(meta)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token(meta, experts),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "attention_bias": has_tensor(meta, "blk.0.attn_q.bias"),
    }


def gemma2(meta: Meta) -> Config:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": meta.count("attention.sliding_window", 4096),
        "query_pre_attn_scalar": query_scalar(meta),
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.real("final_logit_softcapping", 30.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def gemma3(meta: Meta) -> Config:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": meta.count("attention.sliding_window"),
        "layer_types": layer_types(meta, 6),
        "query_pre_attn_scalar": query_scalar(meta),
        "rope_local_base_freq": meta.real("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": meta.real("final_logit_softcapping", None),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def query_scalar(meta: Meta) -> int:
    """Return the number whose square root divides Gemma's queries: the head size, except in the
    27 B models, which are recognised by their number of layers as in llama.cpp."""
    if (meta.architecture, num_layers(meta)) in (("gemma2", 46), ("gemma3", 62)):
        return int(meta.count("embedding_length") // meta.count("attention.head_count"))
    return head_dim(meta)


def phi3(meta: Meta) -> Config:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": meta.count("attention.sliding_window", 0, least=0) or None,
        "partial_rotary_factor": partial_rotary_factor(meta),
    }


def olmo2(meta: Meta) -> Config:
    if meta.has("attention.sliding_window"):
        return olmo3(meta)
    return plain("Olmo2ForCausalLM", "olmo2")(meta)


def granite(meta: Meta) -> Config:
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **biases(meta),
        **granite_factors(meta),
    }


def lfm2(meta: Meta) -> Config:
    has_kv = meta.counts("attention.head_count_kv", num_layers(meta))
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": meta.count("shortconv.l_cache"),
        "conv_bias": has_tensor(meta, f"blk.{has_kv.index(0)}.shortconv.conv.bias")
        if 0 in has_kv
        else False,
        "layer_types": ["full_attention" if each else "conv" for each in has_kv],
    }


def lfm2_moe(meta: Meta) -> Config:
    experts, dense = num_experts(meta), meta.count("leading_dense_block_count", 0, least=0)
    if meta.count("expert_gating_func", SIGMOID) != SIGMOID:
        raise meta.wrong(
            "expert_gating_func", meta.count("expert_gating_func"), f"{SIGMOID} (sigmoid)"
        )
    return {
        **lfm2(meta),
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token(meta, experts),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "use_expert_bias": has_tensor(meta, f"blk.{dense}.exp_probs_b.bias"),
        "routed_scaling_factor": meta.real("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
    }


SIGMOID = 2  # llama.cpp's number for sigmoid scores of experts
ARCHITECTURES: Mapping[str, Callable[[Meta], Config]] = {
    "llama": llama,
    "qwen2": plain("Qwen2ForCausalLM", "qwen2"),
    "qwen3": plain("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": qwen3_moe,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "olmo2": olmo2,
    "granite": granite,
    "smollm3": plain("SmolLM3ForCausalLM", "smollm3"),
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    **GENERAL,
}
"""Readers by the architecture that a file names."""


def main_dtype(header: GgufHeader) -> str:
    """Return the dtype to compute in: bfloat16 if any tensor is quantised, otherwise that of most
    weights."""
    sizes = Counter[str]()
    for stored in header.tensors.values():
        sizes[stored.type.name] += stored.num_bytes
    if not sizes.keys() <= {"F32", "F16", "BF16"}:
        return "bfloat16"
    most = sizes.most_common(1)[0][0] if sizes else ""
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def read_config(header: GgufHeader) -> Config:
    """Return the config.json of a file. Raises ``ModelError`` with the list of known architectures
    if its own is unknown, and for values that are missing or of a wrong type."""
    meta = Meta(header)
    reader = ARCHITECTURES.get(meta.architecture)
    if reader is None:
        raise ModelError(
            f"{header.path} has the architecture {meta.architecture!r:.60}, which is not supported "
            f"as GGUF; supported: {', '.join(ARCHITECTURES)}"
        )
    config = common(meta) | reader(meta) | {"dtype": main_dtype(header)}
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        # If an id is not set, transformers takes that of the architecture's first model.
        config[f"{ours}_token_id"] = meta.token(theirs, config["vocab_size"])
    return config
