"""Nonsense in config.json is answered with a ModelError that says what and where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.config.model import ModelConfig, read_model_info
from engine.errors import ModelError
from engine.models.load import load_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_theta": "x"}, "LlamaForCausalLM"),
        ({"rms_norm_eps": "x"}, "'x'"),
        ({"hidden_size": 1, "num_attention_heads": 2}, "size 0"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["NobodyForCausalLM"]}, "NobodyForCausalLM"),
    ],
)
def test_what_cannot_be_understood_is_named(tmp_path, change, said):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    config = ModelConfig(model=str(tmp_path), load_format="dummy")
    with pytest.raises(ModelError, match=said):
        load_model(config, read_model_info(tmp_path), device="cpu", max_model_len=64)
