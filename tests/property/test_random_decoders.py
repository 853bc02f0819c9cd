"""Random members of random families, sizes odd and even, against transformers."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from e2e.paged import PagedRun
from e2e.tiny_models import CONV, FULL, LINEAR, SLIDING, Case, config_of, random_model, reference

from engine.config.model import ModelConfig, read_model_info
from engine.models.load import load_model

MAX_MODEL_LEN = 128


def pick(dice: random.Random, **choices: list[Any]) -> dict[str, Any]:
    return {name: dice.choice(values) for name, values in choices.items()}


class Heads(NamedTuple):
    """The attention of the CPU is compiled for each of these: two seconds and more."""

    dim: int
    group: int


def random_heads(dice: random.Random) -> Heads:
    return Heads(dice.choice([8, 10, 16, 40, 64]), dice.choice([1, 2, 4]))


def sizes(dice: random.Random, heads: Heads) -> dict[str, Any]:
    kv_heads, group = dice.choice([1, 2, 3]), heads.group
    return {
        "head_dim": heads.dim,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "hidden_size": kv_heads * group * dice.choice([8, 16, 20]),
        **pick(
            dice,
            vocab_size=[101, 256, 300],
            intermediate_size=[24, 57, 128],
            num_hidden_layers=[1, 2, 4],
            max_position_embeddings=[MAX_MODEL_LEN, 1000],
            rms_norm_eps=[1e-6, 1e-5],
            tie_word_embeddings=[True, False],
        ),
    }


def rope_of(dice: random.Random) -> dict[str, Any]:
    kind = dice.choice(["default", "linear", "yarn", "llama3"])
    given: dict[str, Any] = {"rope_type": kind, "rope_theta": dice.choice([100.0, 1e4, 1e6])}
    if kind != "default":
        given["factor"] = dice.choice([1.5, 8.0])
    if kind in ("yarn", "llama3"):
        given["original_max_position_embeddings"] = dice.choice([16, 64])
    if kind == "llama3":
        given.update(low_freq_factor=1.0, high_freq_factor=dice.choice([2.0, 4.0]))
    return given


def layer_types(dice: random.Random, count: int) -> list[str]:
    return [dice.choice([SLIDING, FULL]) for _ in range(count)]


def random_case(dice: random.Random, heads: Heads, family: str = "") -> Case:
    family = family or dice.choice(sorted(OPTIONS))
    options = {**sizes(dice, heads), "rope_parameters": rope_of(dice)}
    options.update(OPTIONS[family](dice, options["num_hidden_layers"]))
    return Case(family, options)


def biases(dice: random.Random, count: int) -> dict[str, Any]:
    return pick(dice, attention_bias=[True, False], mlp_bias=[True, False])


def uniform_window(dice: random.Random, count: int) -> dict[str, Any]:
    return pick(dice, sliding_window=[None, 1, 5, 33])


def qwen(dice: random.Random, count: int) -> dict[str, Any]:
    chosen = pick(dice, use_sliding_window=[True, False], sliding_window=[1, 6, 40])
    return {**chosen, "max_window_layers": dice.randrange(count + 1)}


def gemma(dice: random.Random, count: int) -> dict[str, Any]:
    caps = pick(dice, attn_logit_softcapping=[None, 3.0, 50.0], final_logit_softcapping=[None, 4.0])
    others = pick(dice, sliding_window=[2, 7, 50], query_pre_attn_scalar=[8, 30])
    return {**caps, **others, "layer_types": layer_types(dice, count)}


def gemma3(dice: random.Random, count: int) -> dict[str, Any]:
    ropes = {FULL: rope_of(dice), SLIDING: {"rope_type": "default", "rope_theta": 300.0}}
    kinds = layer_types(dice, count)
    # transformers takes per-layer tables only of kinds that occur.
    return {**gemma(dice, count), "layer_types": kinds, "rope_parameters": ropes}


def granite(dice: random.Random, count: int) -> dict[str, Any]:
    return {
        **biases(dice, count),
        **pick(
            dice,
            embedding_multiplier=[1.0, 7.0],
            residual_multiplier=[1.0, 0.3],
            attention_multiplier=[0.05, 0.3],
            logits_scaling=[1.0, 6.0],
        ),
    }


def smollm3(dice: random.Random, count: int) -> dict[str, Any]:
    window = pick(dice, use_sliding_window=[True, False], sliding_window=[3, 20])
    return {**biases(dice, count), **window, "no_rope_layer_interval": dice.choice([2, 3])}


def phi3(dice: random.Random, count: int) -> dict[str, Any]:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": dice.choice([0.5, 1.0])}
    return {**uniform_window(dice, count), "rope_parameters": rope}


def mixtral(dice: random.Random, count: int) -> dict[str, Any]:
    experts = pick(dice, num_local_experts=[3, 6], num_experts_per_tok=[1, 2, 3])
    return {**uniform_window(dice, count), **experts}


def qwen3_moe(dice: random.Random, count: int) -> dict[str, Any]:
    return pick(
        dice,
        attention_bias=[True, False],
        num_experts=[3, 6],
        num_experts_per_tok=[1, 3],
        moe_intermediate_size=[17, 32],
        norm_topk_prob=[True, False],
        decoder_sparse_step=[1, 2],
        mlp_only_layers=[[], [0]],
        use_sliding_window=[True, False],
        sliding_window=[5],
    )


def gated_delta(dice: random.Random, count: int) -> dict[str, Any]:
    """Attention in at least one layer."""
    kinds = [dice.choice([LINEAR, LINEAR, FULL]) for _ in range(count)]
    kinds[dice.randrange(count)] = FULL
    key_heads = dice.choice([1, 2, 3])
    return {
        "layer_types": kinds,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * dice.choice([1, 2, 4]),
        **pick(
            dice,
            attention_bias=[True, False],
            linear_key_head_dim=[4, 16, 30, 64],
            linear_value_head_dim=[5, 16, 48, 80],
            linear_conv_kernel_dim=[2, 3, 4],
        ),
    }


def shared_experts(dice: random.Random, count: int) -> dict[str, Any]:
    experts = pick(
        dice,
        num_experts=[3, 6],
        num_experts_per_tok=[1, 3],
        moe_intermediate_size=[17, 32],
        shared_expert_intermediate_size=[16, 33],
    )
    return {**gated_delta(dice, count), **experts}


def qwen3_next(dice: random.Random, count: int) -> dict[str, Any]:
    more = pick(
        dice,
        norm_topk_prob=[True, False],
        decoder_sparse_step=[1, 2],
        mlp_only_layers=[[], [0]],
    )
    return {**shared_experts(dice, count), **more}


def llama(dice: random.Random, count: int) -> dict[str, Any]:
    return {**biases(dice, count), **pick(dice, hidden_act=["silu", "gelu", "gelu_pytorch_tanh"])}


def lfm2(dice: random.Random, count: int) -> dict[str, Any]:
    kinds = [dice.choice([CONV, CONV, FULL]) for _ in range(count)]
    kinds[dice.randrange(count)] = FULL
    sizes = pick(
        dice,
        conv_bias=[True, False],
        conv_L_cache=[2, 3, 4, 5],
        block_auto_adjust_ff_dim=[True, False],
        block_multiple_of=[8, 17],
        block_ffn_dim_multiplier=[None, 1.0, 1.4],
        norm_eps=[1e-6, 1e-5],
    )
    return {**sizes, "layer_types": kinds}


def lfm2_moe(dice: random.Random, count: int) -> dict[str, Any]:
    experts = pick(
        dice,
        num_experts=[3, 6],
        num_experts_per_tok=[1, 3],
        moe_intermediate_size=[17, 32],
        norm_topk_prob=[True, False],
        use_expert_bias=[True, False],
        routed_scaling_factor=[1.0, 2.5],
    )
    return {**lfm2(dice, count), **experts, "num_dense_layers": dice.randrange(count + 1)}


OPTIONS = {
    "Gemma2": gemma,
    "Gemma3": gemma3,
    "Granite": granite,
    "Lfm2": lfm2,
    "Lfm2Moe": lfm2_moe,
    "Llama": llama,
    "Mistral": uniform_window,
    "Mixtral": mixtral,
    "Olmo2": biases,
    "Phi3": phi3,
    "Qwen2": qwen,
    "Qwen3": qwen,
    "Qwen3Moe": qwen3_moe,
    "Qwen3Next": qwen3_next,
    "Qwen3_5MoeText": shared_experts,
    "Qwen3_5Text": gated_delta,
    "SmolLM3": smollm3,
}


def check(case: Case, path: Path, dice: random.Random) -> None:
    random_model(config_of(case), seed=dice.randrange(10**6)).save_pretrained(path)
    info = read_model_info(path)
    model = load_model(ModelConfig(model="tiny"), info, device="cpu", max_model_len=MAX_MODEL_LEN)
    tokens = dice.choices(range(case.options["vocab_size"]), k=dice.choice([3, 37, 70]))
    run = PagedRun(model, block_size=dice.choice([4, 8, 16, 32]), seed=dice.randrange(10**6))
    ours = run.prefill("a", tokens, chunk=dice.choice([None, 1, 5, 16]))
    with torch.inference_mode():
        theirs = reference(path)(torch.tensor([tokens]), use_cache=False).logits[0]
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"off by {error:.2e} of the largest logit: {case}"


@pytest.mark.parametrize("part", range(2))
def test_random_decoders_equal_transformers(tmp_path: Path, seed: int, part: int) -> None:
    """Of one size of heads each; the long form draws it for every model."""
    dice = random.Random(seed)
    heads = random_heads(dice)
    for number in range(9):
        check(random_case(dice, heads), tmp_path / str(number), dice)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_decoders_equal_transformers(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(1000):
        check(random_case(dice, random_heads(dice)), tmp_path / str(number), dice)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", "Lfm2Moe"])
def test_random_models_with_states_equal_transformers(
    tmp_path: Path, seed: int, family: str
) -> None:
    dice = random.Random(seed)
    for number in range(12):
        check(random_case(dice, random_heads(dice), family), tmp_path / str(number), dice)
