"""Random tiny models of every native family, in several shapes, made by transformers itself."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 300

# Attention is compiled for each head size and number of query heads a key head, in seconds: cases
# share few pairs of them.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING, FULL, CONV = "sliding_attention", "full_attention", "conv"
LINEAR = "linear_attention"
# Of the gated delta rule, and of experts.
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
SMALL_MLP = {"block_multiple_of": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
GRANITE_HYBRID = {
    **MAMBA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 96,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}
FALCON = {
    **MAMBA,
    "mamba_d_ssm": 128,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.8, 1.7],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.5, 0.6],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.8,
}
NEMOTRON = ["linear_attention", "mlp", "full_attention", "mlp", "moe", "linear_attention"]
NEMOTRON_SIZES = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Long: 512 positions exceed 32, as do all sequences tested, so both sides take the long factors.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.4 * i for i in range(8)],
}


class Case(NamedTuple):
    """A family (the prefix of its classes' names) and what this model sets beside ``BASE``."""

    family: str
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32


CASES: dict[str, Case] = {
    "llama": Case("Llama", {}),
    "llama-mha-tied-biased": Case(
        "Llama",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama-mqa-head-dim": Case("Llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-llama3": Case("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": Case(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "llama-dynamic": Case(
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "llama-yarn": Case("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": Case(
        "Llama",
        {
            "rope_parameters": {
                **YARN,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "beta_fast": 16,
                "beta_slow": 2,
                "truncate": False,
            }
        },
    ),
    "llama-longrope": Case(
        "Llama", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8}}
    ),
    "llama-gelu": Case("Llama", {"hidden_act": "gelu"}),
    "llama-bf16": Case("Llama", {}, torch.bfloat16),
    "mistral": Case("Mistral", {"sliding_window": None}),
    "mistral-window": Case("Mistral", {"sliding_window": 9, "head_dim": 32}),
    "ministral": Case(
        "Ministral", {"sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING], "head_dim": 32}
    ),
    "qwen2": Case("Qwen2", {}),
    "qwen2-window": Case(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "qwen3-window-biased": Case(
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": [SLIDING, FULL, SLIDING],
            "num_key_value_heads": 4,
            "rope_parameters": YARN,
        },
    ),
    "gemma2": Case("Gemma2", {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24}),
    "gemma2-no-caps": Case(
        "Gemma2",
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 5.0,
            "layer_types": [FULL, SLIDING, SLIDING],
        },
    ),
    "gemma2-caps": Case(
        "Gemma2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": Case(
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": [SLIDING, FULL, SLIDING],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3-linear": Case(
        "Gemma3",
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            "layer_types": [SLIDING, SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            },
            "final_logit_softcapping": 4.0,
        },
    ),
    "phi3": Case("Phi3", {}),
    "phi3-partial-window": Case(
        "Phi3",
        {
            "sliding_window": 11,
            "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3-longrope": Case(
        "Phi3",
        {
            "num_key_value_heads": 4,
            "original_max_position_embeddings": 8,
            "rope_parameters": LONGROPE,
        },
    ),
    "olmo2": Case("Olmo2", {}),
    "olmo2-mqa": Case("Olmo2", {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.35,
            "attention_multiplier": 0.11,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-biased": Case(
        "Granite",
        {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2},
    ),
    "smollm3": Case("SmolLM3", {"no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    "smollm3-window": Case(
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    # transformers goes by layer_types alone.
    "smollm3-window-by-type": Case(
        "SmolLM3", {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]}
    ),
    "mixtral": Case("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": Case(
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9, "head_dim": 32},
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "qwen3-moe-mixed": Case(
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 10,
            "head_dim": 32,
        },
    ),
    "lfm2": Case(
        "Lfm2", {"num_hidden_layers": 4, "layer_types": [CONV, FULL, CONV, CONV], **SMALL_MLP}
    ),
    "lfm2-biased": Case(
        "Lfm2",
        {
            "layer_types": [FULL, CONV, FULL],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-older": Case(
        "Lfm2",
        {
            "full_attn_idxs": [1],
            "conv_L_cache": 2,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.3,
            "num_key_value_heads": 4,
        },
    ),
    "lfm2-bf16": Case("Lfm2", {"layer_types": [CONV, FULL, CONV], **SMALL_MLP}, torch.bfloat16),
    "lfm2-moe": Case(
        "Lfm2Moe",
        {
            "num_hidden_layers": 4,
            "layer_types": [CONV, CONV, FULL, CONV],
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite-hybrid": Case("GraniteMoeHybrid", GRANITE_HYBRID | {"num_local_experts": 0}),
    "granite-hybrid-moe": Case(
        "GraniteMoeHybrid",
        GRANITE_HYBRID
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
        },
    ),
    "bamba": Case(
        "Bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1], "mlp_bias": True, **MAMBA}
    ),
    "bamba-limits": Case(
        "Bamba",
        {
            **MAMBA,
            "attn_layer_indices": [0, 2],
            "mamba_n_groups": 4,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "falcon-h1": Case("FalconH1", {"num_hidden_layers": 2, **FALCON}),
    "falcon-h1-norm": Case(
        "FalconH1",
        {
            **FALCON,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    "nemotron-h": Case(
        "NemotronH", {"layers_block_type": NEMOTRON[:4], "num_hidden_layers": 4, **NEMOTRON_SIZES}
    ),
    "nemotron-h-moe": Case(
        "NemotronH",
        {
            "layers_block_type": NEMOTRON,
            "num_hidden_layers": 6,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            **NEMOTRON_SIZES,
        },
    ),
    "jamba": Case("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}),
    "jamba-moe": Case(
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
        },
    ),
    "mamba2": Case("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "mamba": Case("Mamba", {"state_size": 8}),
    "falcon-mamba": Case("FalconMamba", {"state_size": 8, "use_bias": True}),
    "lfm2-moe-plain": Case(
        "Lfm2Moe",
        {
            "layer_types": [FULL, CONV, CONV],
            "num_dense_layers": 0,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
        },
    ),
    "qwen3-next": Case("Qwen3Next", {**DELTA, **SHARED_MOE}),
    "qwen3-next-mixed": Case(
        "Qwen3Next",
        {
            **DELTA,
            **SHARED_MOE,
            "num_hidden_layers": 4,
            "layer_types": [FULL, LINEAR, LINEAR, LINEAR],
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "norm_topk_prob": False,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5": Case("Qwen3_5Text", DELTA),
    "qwen3.5-tied": Case(
        "Qwen3_5Text",
        {
            **DELTA,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-bf16": Case("Qwen3_5Text", DELTA, torch.bfloat16),
    "qwen3.5-moe": Case("Qwen3_5MoeText", {**DELTA, **SHARED_MOE}),
}


class TinyModels:
    """Model directories under one root, each made when first asked for and then shared."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._references: dict[str, PreTrainedModel] = {}

    def path(self, name: str) -> Path:
        """Directory of a case of ``CASES``."""
        return make_tiny_model(name, self.root, CASES[name].dtype)

    def reference(self, name: str) -> PreTrainedModel:
        """What transformers makes of that directory, in float32 with its plainest attention."""
        if name not in self._references:
            self._references[name] = reference(self.path(name))
        return self._references[name]


def make_tiny_model(name: str, directory: Path, dtype: torch.dtype) -> Path:
    """Write the model of a case of ``CASES`` below a directory; returns its own."""
    path = directory / name
    if not path.exists():
        save(random_model(config_of(CASES[name]), seed=zlib.crc32(name.encode())), path, dtype)
    return path


def reference(path: Path) -> PreTrainedModel:
    """What transformers makes of a directory, in float32 with its plainest code."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def config_of(case: Case) -> PreTrainedConfig:
    family = "Gemma3Text" if case.family == "Gemma3" else case.family
    made = getattr(transformers, f"{family}Config")
    # A file of Mamba does not mention attention: the engine must not look for it.
    known = {**BASE} if "Mamba" not in family else BASE.keys() & made.__dataclass_fields__
    options = {**{name: BASE[name] for name in known}, **case.options}
    # Nested tables are changed in place by the classes that take them.
    return made(**_copied(options))


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A causal model whose every parameter matters: no unit norms, no zero biases."""
    return randomised(
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed
    )


def randomised(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model with random weights: norms near their value, all else around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.2 if parameter.dim() > 1 else 0.3))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.tie_weights()
    return model


def save(model: PreTrainedModel, path: Path, dtype: torch.dtype = torch.float32) -> None:
    model.to(dtype).save_pretrained(path)
