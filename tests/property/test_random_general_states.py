"""Random models with recurrent states that run with transformers' modules, in random situations:
the tokens of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import MLA, general_config
from e2e.references import Tally
from e2e.tiny_models import FULL, LINEAR, VOCAB, random_model, reference
from property.test_random_states import SITUATIONS, prompts, serve, told

from engine.errors import ModelError

NUM_CONFIGURATIONS = 6
Dice = random.Random


def mixed(dice: Dice, one: str, other: str) -> list[str]:
    """Two kinds of layers in random order, both of which occur."""
    kinds = [one, other, *dice.choices([one, other], k=dice.randrange(3))]
    return dice.sample(kinds, len(kinds))


def zamba2(dice: Dice) -> dict[str, Any]:
    num_groups, num_heads = dice.choice([(1, 4), (2, 4), (4, 4), (1, 8)])
    return {
        "hidden_size": 32,
        "num_key_value_heads": 4,
        "layers_block_type": mixed(dice, "mamba", "hybrid"),
        "n_mamba_heads": num_heads,
        "mamba_ngroups": num_groups,
        "mamba_d_state": dice.choice([8, 16, 24]),
        "mamba_d_conv": dice.choice([2, 4]),
        "chunk_size": dice.choice([4, 16, 256]),
        "time_step_min": dice.choice([0.001, 0.5]),
        "add_bias_linear": dice.random() < 0.5,
        "use_mem_rope": dice.random() < 0.5,
        "use_shared_attention_adapter": dice.random() < 0.5,
        "adapter_rank": dice.choice([4, 8]),
    }


def kimi_linear(dice: Dice) -> dict[str, Any]:
    kinds = mixed(dice, LINEAR, FULL)
    return {
        **MLA,
        "layer_types": kinds,
        "linear_num_heads": dice.choice([1, 3, 4]),
        "linear_head_dim": dice.choice([8, 16, 24]),
        "linear_conv_kernel_dim": dice.choice([2, 4]),
        "q_lora_rank": dice.choice([None, 24]),
        "num_local_experts": 4,
        "mlp_layer_types": dice.choices(["dense", "sparse"], k=len(kinds)),
        "routed_scaling_factor": dice.choice([1.0, 2.4]),
        "tie_word_embeddings": dice.random() < 0.5,
    }


def olmo_hybrid(dice: Dice) -> dict[str, Any]:
    num_heads = dice.choice([1, 2, 4])
    return {
        "layer_types": mixed(dice, LINEAR, FULL),
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads * dice.choice([1, 2]),
        "linear_key_head_dim": dice.choice([8, 12]),
        "linear_value_head_dim": dice.choice([16, 24]),
        "linear_conv_kernel_dim": dice.choice([2, 4]),
        "linear_allow_neg_eigval": dice.random() < 0.5,
        "rope_parameters": dice.choice([None, {"rope_type": "default", "rope_theta": 500.0}]),
    }


FAMILIES: dict[str, Callable[[Dice], dict[str, Any]]] = {
    "Zamba2Config": zamba2,
    "KimiLinearConfig": kimi_linear,
    "OlmoHybridConfig": olmo_hybrid,
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_modules_in_random_situations(tmp_path: Path, seed: int, family: str) -> None:
    dice, tally = random.Random(seed), Tally()
    for number in range(NUM_CONFIGURATIONS):
        options = FAMILIES[family](dice)
        kinds = options.get("layer_types") or options["layers_block_type"]
        config = general_config(family, {**options, "num_hidden_layers": len(kinds)})
        path = tmp_path / str(number)
        random_model(config, seed=dice.randrange(10**6)).save_pretrained(path)
        right = told(reference(path), prompts(dice, VOCAB))
        for make in (SITUATIONS[number % len(SITUATIONS)], dice.choice(SITUATIONS)):
            situation = make(dice, str(path))
            try:
                serve(str(path), right, situation, tally)
            except (AssertionError, ModelError) as error:
                raise AssertionError(f"{family} {options} with {situation}") from error
    assert tally.ties <= 0.01 * tally.compared
