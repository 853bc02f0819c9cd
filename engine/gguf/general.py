"""Builds config.json for architectures that transformers' modules compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.gguf.facts import (
    biases,
    experts_per_token,
    granite_factors,
    has_tensor,
    layer_types,
    num_experts,
    partial_rotary_factor,
    plain,
)
from engine.gguf.meta import Meta
from engine.gguf.rope import rope_scaling

Config = dict[str, Any]


def gemma(meta: Meta) -> Config:
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_activation": "gelu_pytorch_tanh",
    }


def starcoder2(meta: Meta) -> Config:
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "norm_epsilon": meta.real("attention.layer_norm_epsilon"),
        "use_bias": has_tensor(meta, "blk.0.attn_q.bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
    }


def stablelm(meta: Meta) -> Config:
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "layer_norm_eps": meta.real("attention.layer_norm_epsilon"),
        "use_parallel_residual": meta.flag("use_parallel_residual", False),
        "use_qkv_bias": has_tensor(meta, "blk.0.attn_q.bias"),
        "partial_rotary_factor": partial_rotary_factor(meta),
    }


def cohere(meta: Meta) -> Config:
    return {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "layer_norm_eps": meta.real("attention.layer_norm_epsilon"),
        "logit_scale": meta.real("logit_scale"),
        "use_qk_norm": has_tensor(meta, "blk.0.attn_q_norm.weight"),
    }


def cohere2(meta: Meta) -> Config:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "layer_norm_eps": meta.real("attention.layer_norm_epsilon"),
        "logit_scale": meta.real("logit_scale"),
        "sliding_window": meta.count("attention.sliding_window"),
        "layer_types": layer_types(meta, 4),
    }


def olmo3(meta: Meta) -> Config:
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        **biases(meta),
        "sliding_window": meta.count("attention.sliding_window"),
        "layer_types": layer_types(meta, 4),
    }


def olmoe(meta: Meta) -> Config:
    experts = num_experts(meta)
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token(meta, experts),
        "norm_topk_prob": False,
    }


def exaone4(meta: Meta) -> Config:
    window = meta.count("attention.sliding_window", None)
    types = {} if window is None else {"layer_types": layer_types(meta, 4)}
    return {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "sliding_window": window,
        **types,
    }


def glm4(meta: Meta) -> Config:
    return {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": has_tensor(meta, "blk.0.attn_q.bias"),
        "partial_rotary_factor": partial_rotary_factor(meta),
    }


def seed_oss(meta: Meta) -> Config:
    return {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "attention_bias": has_tensor(meta, "blk.0.attn_q.bias"),
        "attention_out_bias": has_tensor(meta, "blk.0.attn_output.bias"),
    }


def arcee(meta: Meta) -> Config:
    return {
        **plain("ArceeForCausalLM", "arcee")(meta),
        "hidden_act": "relu2",
    }


def mistral3(meta: Meta) -> Config:
    if not meta.has("attention.temperature_scale"):
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": None,
        }
    scaling = rope_scaling(meta, 1.0).get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        raise meta.wrong("rope.scaling.type", scaling.get("rope_type", "none"), "yarn")
    beta = meta.real("attention.temperature_scale")
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_scaling": {**scaling, "llama_4_scaling_beta": beta},
    }


def qwen2_moe(meta: Meta) -> Config:
    experts = num_experts(meta)
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token(meta, experts),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def granite_moe(meta: Meta) -> Config:
    experts = num_experts(meta)
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "num_local_experts": experts,
        "num_experts_per_tok": experts_per_token(meta, experts),
        **granite_factors(meta),
    }


def gpt_oss(meta: Meta) -> Config:
    experts = num_experts(meta)
    theta = meta.real("rope.freq_base", 10_000.0)
    return {
        # Without an entry, transformers scales as in the published models.
        "rope_scaling": {"rope_type": "default"},
        **rope_scaling(meta, theta),
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": experts,
        "num_experts_per_tok": experts_per_token(meta, experts),
        "intermediate_size": meta.count("expert_feed_forward_length"),
        "sliding_window": meta.count("attention.sliding_window"),
        "layer_types": layer_types(meta, 2),
        "attention_bias": has_tensor(meta, "blk.0.attn_q.bias"),
    }


GENERAL: Mapping[str, Callable[[Meta], Config]] = {
    "gemma": gemma,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "command-r": cohere,
    "cohere2": cohere2,
    "olmoe": olmoe,
    "exaone4": exaone4,
    "glm4": glm4,
    "seed_oss": seed_oss,
    "ernie4_5": plain("Ernie4_5ForCausalLM", "ernie4_5"),
    "arcee": arcee,
    "mistral3": mistral3,
    "qwen2moe": qwen2_moe,
    "granitemoe": granite_moe,
    "gpt-oss": gpt_oss,
}
"""Readers by the architecture that a file names."""
