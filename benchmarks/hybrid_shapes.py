"""Shapes of models with recurrent states, as configurations that transformers initialises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

_LFM2_ATTENTION, _GRANITE_ATTENTION = (2, 5, 8, 10, 12, 14), (10, 13, 17, 27)
# By name: the keys of config.json that differ from the defaults of the model type.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2-350m": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "conv_dim": 1024,  # this and the next one are keys that vLLM reads
        "block_dim": 1024,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "layer_types": ["full_attention" if i in _LFM2_ATTENTION else "conv" for i in range(16)],
    },
    "qwen3.5-0.3b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "mamba_ssm_dtype": "float32",
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 65536,
        "tie_word_embeddings": True,
        "layer_types": ([*["linear_attention"] * 3, "full_attention"] * 3),
    },
    "granite-4-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 768,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "max_position_embeddings": 131072,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.246,
        "logits_scaling": 3.0,
        "vocab_size": 65536,
        "tie_word_embeddings": True,
        "layer_types": ["attention" if i in _GRANITE_ATTENTION else "mamba" for i in range(32)],
    },
    "mamba2-130m": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "num_heads": 24,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
    },
    "mamba-130m": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "vocab_size": 50280,
    },
}


def hybrid_config(name: str) -> PretrainedConfig:
    """The configuration of a shape."""
    return AutoConfig.for_model(**HYBRIDS[name], eos_token_id=2)


def write_hybrid(name: str, path: Path) -> None:
    """Write a model directory with random weights in bfloat16, without a tokenizer."""
    config = hybrid_config(name)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
