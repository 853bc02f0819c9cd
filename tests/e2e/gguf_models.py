"""Random tiny models as GGUF files, and their dequantised twins as model directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from e2e.tiny_models import (
    BASE,
    CASES,
    FULL,
    LLAMA3,
    LONGROPE,
    SLIDING,
    Case,
    config_of,
    random_model,
    save,
)
from gguf.constants import GGMLQuantizationType
from support.made_gguf import MadeGguf

Kind = GGMLQuantizationType

# What the format cannot express is left out: windows of Llama, Mixtral and Qwen models, layers
# without experts, activations other than SiLU and the like.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,  # attention of this shape is compiled for other tests, too
}
FAMILIES: dict[str, Case] = {
    **{
        name: CASES[name]
        for name in (
            *("llama", "llama-mha-tied-biased", "llama-mqa-head-dim", "llama-llama3"),
            *("llama-linear", "llama-yarn", "llama-bf16", "mistral", "qwen2", "qwen3"),
            *("gemma2", "gemma3", "gemma3-linear", "phi3", "phi3-longrope"),
            *("olmo2", "olmo2-mqa", "granite", "granite-biased", "mixtral", "lfm2"),
        )
    },
    "llama-3.1": Case(
        "Llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}},
    ),
    "llama-yarn-betas": Case(
        "Llama",
        {
            "rope_parameters": {
                **CASES["llama-yarn"].options["rope_parameters"],
                "beta_fast": 16,
                "beta_slow": 2,
            }
        },
    ),
    "qwen3-yarn-biased": Case(
        "Qwen3",
        {
            "attention_bias": True,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": CASES["qwen3-window-biased"].options["rope_parameters"],
        },
    ),
    "qwen2-tied": Case("Qwen2", {"tie_word_embeddings": True}),
    "phi3-partial": Case(
        "Phi3",
        {
            "sliding_window": 11,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "rope_type": "longrope",
                "short_factor": LONGROPE["short_factor"][:4],
                "long_factor": LONGROPE["long_factor"][:4],
            },
            "original_max_position_embeddings": 64,
        },
    ),
    "smollm3": Case("SmolLM3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "qwen3-moe": Case(
        "Qwen3Moe",
        {
            **CASES["qwen3-moe"].options,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "lfm2-moe": Case("Lfm2Moe", {**CASES["lfm2-moe"].options, "routed_scaling_factor": 1.0}),
    # Rows of 256 elements, which all types of tensors can store.
    "wide-llama": Case("Llama", WIDE),
    "wide-gemma3": Case(
        "Gemma3",
        {
            **WIDE,
            "sliding_window": 7,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "wide-qwen3-moe": Case(
        "Qwen3Moe",
        {
            **WIDE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "wide-lfm2": Case(
        "Lfm2",
        {
            **WIDE,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 256,
        },
    ),
}
_WINDOWS = [SLIDING, SLIDING, FULL]
GENERAL: dict[str, Case] = {
    "gemma": Case("Gemma", {"head_dim": 16}),
    "starcoder2": Case("Starcoder2", {"sliding_window": None, "use_bias": True}),
    "stablelm": Case("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": Case("StableLm", {"use_parallel_residual": True}),
    "command-r": Case("Cohere", {"logit_scale": 0.3}),
    "command-r-plus": Case("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": Case(
        "Cohere2",
        {"sliding_window": 7, "layer_types": [*3 * [SLIDING], FULL], "num_hidden_layers": 4},
    ),
    "olmo3": Case("Olmo3", {"sliding_window": 8, "layer_types": _WINDOWS}),
    "olmo3-yarn": Case(
        "Olmo3",
        {
            "sliding_window": 8,
            "layer_types": _WINDOWS,
            "rope_parameters": CASES["llama-yarn"].options["rope_parameters"],
        },
    ),
    "olmoe": Case("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "exaone4": Case("Exaone4", {"sliding_window": 8, "layer_types": _WINDOWS}),
    "glm4": Case("Glm4", {"head_dim": 16, "attention_bias": True}),
    "seed_oss": Case("SeedOss", {"head_dim": 16, "attention_bias": True}),
    "ernie4_5": Case("Ernie4_5", {"head_dim": 16}),
    "arcee": Case("Arcee", {}),
    "mistral3": Case(
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **CASES["llama-yarn"].options["rope_parameters"],
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "granitemoe": Case(
        "GraniteMoe",
        {
            **CASES["granite"].options,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2moe": Case(
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "gpt-oss": Case(
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL, SLIDING],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
"""Families that transformers' modules compute."""
WIDE_GENERAL: dict[str, Case] = {
    "wide-gemma": Case("Gemma", WIDE),
    "wide-glm4": Case("Glm4", {**WIDE, "attention_bias": True}),
    "wide-qwen2moe": Case(
        "Qwen2Moe",
        {
            **WIDE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "wide-gpt-oss": Case(
        "GptOss",
        {
            **WIDE,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
"""The same with rows of 256 elements."""
MIXED = {
    "attn_k": Kind.Q5_0,
    "attn_v": Kind.Q6_K,
    "ffn_gate": Kind.F16,
    "ffn_gate_exps": Kind.F16,
    "ffn_up_exps": Kind.IQ4_XS,
    "blk.0.ffn_down": Kind.Q3_K,
    "attn_output": Kind.Q5_1,
    "token_embd": Kind.Q8_0,
    "output": Kind.Q6_K,
}
"""Types of tensors in files of many types, by the end of the tensors' names."""
WIDE_FAMILIES = tuple(name for name in FAMILIES if name.startswith("wide-"))


class GgufModel(NamedTuple):
    file: Path
    twin: Path
    made: MadeGguf


class GgufModels:
    """GGUF files under one root, each made when it is first used."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[tuple[str, Kind], GgufModel] = {}

    def source(self, name: str) -> Path:
        """Directory of the model that a family's files are made from."""
        path = self.root / name / "source"
        if not path.exists():
            case = {**FAMILIES, **GENERAL, **WIDE_GENERAL}[name]
            save(random_model(config_of(case), seed=len(name)), path, case.dtype)
        return path

    def mixed(self, name: str) -> GgufModel:
        """The file of a wide family with matrices of many types, and its twin."""
        made = MadeGguf(self.source(name), Kind.Q4_K, MIXED)
        place = self.root / name
        twin = place / "mixed-twin"
        if not twin.exists():
            made.write_twin(twin)
        return GgufModel(made.write(place / f"{name}-mixed.gguf"), twin, made)

    def get(self, name: str, kind: Kind = Kind.F32) -> GgufModel:
        """The file of a family whose matrices are of one type, and its twin."""
        if (name, kind) not in self._made:
            place = self.root / name
            made = MadeGguf(self.source(name), kind)
            self._made[name, kind] = GgufModel(
                made.write(place / f"{name}-{kind.name}.gguf"),
                made.write_twin(place / f"{kind.name}-twin"),
                made,
            )
        return self._made[name, kind]


assert BASE["hidden_size"] % 256, "the narrow families have matrices that K-quants cannot store"
