"""Directories that peft writes: what is read changes a model as peft's own merge does."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_models import TinyModels
from support import adapter_files

from engine.lora.files import read_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ATTENTION + MLP}),
    ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    ("llama", {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2, r".*\.1\..*k_proj": 7}}),
    (
        "llama",
        {"target_modules": MLP, "alpha_pattern": {"down_proj": 3, "layers.2.mlp.up_proj": 5}},
    ),
    ("llama", {"target_modules": r".*\.(0|2)\.self_attn\.[qv]_proj"}),
    ("llama", {"target_modules": ["model.layers.1.mlp.up_proj", "self_attn.o_proj"]}),
    ("llama", {"target_modules": MLP, "exclude_modules": r".*\.1\.mlp\.up_proj"}),
    ("llama", {"target_modules": MLP, "layers_to_transform": [1], "layers_pattern": "layers"}),
    ("llama", {"target_modules": ATTENTION + MLP, "use_dora": True, "use_rslora": True}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True}),
    ("llama-mha-tied-biased", {"target_modules": ATTENTION, "lora_bias": True}),
    ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm"]}),
    ("qwen3-moe", EXPERTS),
    ("mixtral", {**EXPERTS, "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}),
    ("qwen3-moe", {**EXPERTS, "target_parameters": ["gate_up_proj", "down_proj", "gate.weight"]}),
    ("lfm2", {"target_modules": ["in_proj", "out_proj", "w1", "w2", "w3"]}),
    ("granite-hybrid", {"target_modules": ["in_proj", "out_proj", "input_linear"]}),
]


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)]
)
def test_what_peft_saves(
    tiny_models: TinyModels, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    base = tiny_models.reference(name)
    state = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    made = adapter_files.trained(copy.deepcopy(base), **options)
    adapter = read_adapter(adapter_files.save(made, tmp_path), "one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = made.merge_and_unload().state_dict()
    found = adapter_files.merged(state, adapter)
    changed = [
        key for key in expected if not torch.equal(expected[key], state.get(key, expected[key][:0]))
    ]
    assert len(changed) >= len(list(adapter.products())), "the adapter changes weights"
    assert set(expected) == set(found)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key].float(), tensor, rtol=1e-6, atol=1e-6, msg=key)
