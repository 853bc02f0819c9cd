"""Random tiny models of families that run through transformers' own modules."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from e2e.tiny_models import (
    BASE,
    CASES,
    FULL,
    LINEAR,
    LONGROPE,
    SLIDING,
    TinyModels,
    random_model,
    reference,
    save,
)
from transformers import PreTrainedConfig, PreTrainedModel


class GeneralCase(NamedTuple):
    """A configuration class and what this model sets beside ``BASE``."""

    config_class: str
    options: dict[str, Any]


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

GENERAL_CASES: dict[str, GeneralCase] = {
    # Learned positions, biases everywhere, MHA.
    "gpt2": GeneralCase("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 3}),
    "opt": GeneralCase("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    "gpt-bigcode": GeneralCase(
        "GPTBigCodeConfig", {"n_embd": 64, "n_head": 4, "n_layer": 3, "multi_query": True}
    ),
    # Parallel residuals and partial rotary embeddings.
    "gpt-neox": GeneralCase("GPTNeoXConfig", {"rope_parameters": {**ROPE, "rope_theta": 500.0}}),
    "phi": GeneralCase("PhiConfig", {"qk_layernorm": True}),
    "stablelm": GeneralCase("StableLmConfig", {"use_parallel_residual": True}),
    "starcoder2-window": GeneralCase("Starcoder2Config", {"sliding_window": 9}),
    "nemotron": GeneralCase("NemotronConfig", {"head_dim": 16}),
    # Scaled logits.
    "cohere": GeneralCase("CohereConfig", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2-mixed": GeneralCase(
        "Cohere2Config", {"sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]}
    ),
    "olmo-clipped": GeneralCase("OlmoConfig", {"clip_qkv": 0.8}),
    "olmo3-yarn": GeneralCase(
        "Olmo3Config",
        {
            "sliding_window": 8,
            "layer_types": [SLIDING, SLIDING, FULL],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "olmoe": GeneralCase("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": GeneralCase("GemmaConfig", {"head_dim": 16}),
    "vaultgemma-caps": GeneralCase(
        "VaultGemmaConfig",
        {
            "head_dim": 16,
            "sliding_window": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3n-shared-kv": GeneralCase(
        "Gemma3nTextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "sliding_window": 8,
            "num_kv_shared_layers": 2,
            "intermediate_size": 96,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
    ),
    "gemma4-two-head-sizes": GeneralCase(
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 8,
            "num_kv_shared_layers": 0,
            "layer_types": [SLIDING, SLIDING, FULL],
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 8,
        },
    ),
    # The upper layers read the caches of two lower ones, as in E2B and E4B.
    "gemma4-shared-kv": GeneralCase(
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "helium": GeneralCase("HeliumConfig", {"head_dim": 16}),
    "glm": GeneralCase("GlmConfig", {"head_dim": 16}),
    "glm4": GeneralCase("Glm4Config", {"head_dim": 16}),
    "gpt-oss-sinks": GeneralCase(
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL, SLIDING],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "exaone4-nope": GeneralCase(
        "Exaone4Config", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}
    ),
    "ernie4-5": GeneralCase("Ernie4_5Config", {"head_dim": 16}),
    "dynamic-rope": GeneralCase(
        "ArceeConfig",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
        },
    ),
    "longrope": GeneralCase(
        "ArceeConfig", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8}}
    ),
    "dynamic-rope-in-some-layers": GeneralCase(
        "ModernBertDecoderConfig",
        {
            "layer_types": [SLIDING, FULL, SLIDING],
            "local_attention": 8,
            "max_position_embeddings": 16,
            "rope_parameters": {
                SLIDING: ROPE,
                FULL: {**ROPE, "rope_type": "dynamic", "factor": 4.0},
            },
        },
    ),
    # Keys wider than values, no two heads' keys alike.
    "deepseek-v2": GeneralCase("DeepseekV2Config", {**MLA, "q_lora_rank": None}),
    "deepseek-v3": GeneralCase("DeepseekV3Config", MLA),
    # Twice the key-value heads and sinks in layers with windows; values narrower than keys.
    "mimo-v2-flash": GeneralCase(
        "MiMoV2FlashConfig",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "v_head_dim": 8,
            "sliding_window": 6,
            "layer_types": [FULL, SLIDING, SLIDING],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    # Chunks, and layers without rotary embedding whose queries are scaled by position.
    "llama4-chunks": GeneralCase(
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", FULL, "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
        },
    ),
    # Two calls of attention in a layer.
    "diffllama": GeneralCase("DiffLlamaConfig", {}),
    # Recurrent states: shared attention next to Mamba-2, gated delta rules, short convolutions,
    # convolutions inside of attention.
    "zamba2": GeneralCase(
        "Zamba2Config",
        {
            "hidden_size": 32,  # attention has twice as many columns
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_key_value_heads": 4,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "adapter_rank": 8,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
    ),
    "kimi-linear": GeneralCase(
        "KimiLinearConfig",
        {
            **MLA,
            "layer_types": [LINEAR, FULL, LINEAR],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_local_experts": 4,
        },
    ),
    "olmo-hybrid": GeneralCase(
        "OlmoHybridConfig",
        {
            "layer_types": [LINEAR, LINEAR, FULL],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
        },
    ),
    "bailing-hybrid": GeneralCase(
        "BailingHybridConfig",
        {**MLA, "head_dim": 16, "layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 4},
    ),
    "lfm3": GeneralCase("Lfm3Config", {"head_dim": 16, "sliding_window": 8}),
    "zaya": GeneralCase(
        "ZayaConfig",
        {
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 48,
            "router_hidden_size": 32,
        },
    ),
}
WITH_STATES = ("zamba2", "kimi-linear", "olmo-hybrid", "bailing-hybrid", "lfm3", "zaya")

STATE_ELSEWHERE = (
    "recurrent state, but not in the LinearAttentionLayer.*Kimi-Linear and OLMo-hybrid"
)
# Architecture -> configuration class, options, and a word of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "RwkvForCausalLM": ("RwkvConfig", {}, STATE_ELSEWHERE),
    "xLSTMForCausalLM": ("xLSTMConfig", {}, STATE_ELSEWHERE),
    "MiniMaxForCausalLM": ("MiniMaxConfig", {}, STATE_ELSEWHERE),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {}, STATE_ELSEWHERE),
    # transformers computes a prompt in chunks without the state of the chunk before.
    "ZambaForCausalLM": (
        "ZambaConfig",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_hidden_layers": 4,
            "n_mamba_heads": 2,
        },
        "ZambaMambaMixer depend on how tokens are divided",
    ),
    "T5ForConditionalGeneration": ("T5Config", {}, "encoder-decoder"),
    "BloomForCausalLM": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "interface"),
    "BertLMHeadModel": ("BertConfig", {"is_decoder": False}, "mask"),
    "RobertaForCausalLM": ("RobertaConfig", {"is_decoder": True}, "order"),
    "DogeForCausalLM": ("DogeConfig", {}, "mask"),
}


def general_config(config_class: str, options: dict[str, Any]) -> PreTrainedConfig:
    config = getattr(transformers, config_class)(**{**BASE, **options})
    if config.pad_token_id is not None:
        config.pad_token_id = 0
    return config


def make_general_model(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of a case of ``GENERAL_CASES`` below a directory; returns its own."""
    path = directory / name
    if not path.exists():
        config = general_config(*GENERAL_CASES[name])
        save(random_model(config, seed=zlib.crc32(name.encode())), path, dtype)
    return path


def model_and_reference(
    name: str, tiny_models: TinyModels, directory: Path
) -> tuple[Path, PreTrainedModel]:
    """The directory of a native or general case, and what transformers makes of it in float32."""
    if name in CASES:
        return tiny_models.path(name), tiny_models.reference(name)
    path = make_general_model(name, directory)
    return path, reference(path)
