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
    if kind == "default":  # most families rotate whole heads all the same
        given["partial_rotary_factor"] = dice.choice([0.5, 1.0])
    else:
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
        block_ffn_dim_multiplier=[1.0, 1.4],
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


def mamba_heads(dice: random.Random) -> dict[str, Any]:
    """Sizes of Mamba-2 whose heads fill twice the hidden size."""
    heads, dim = dice.choice([(4, 16), (6, 10), (8, 24), (2, 48)])
    return {
        "hidden_size": heads * dim // 2,
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        **pick(
            dice,
            mamba_n_groups=[1, 2],
            mamba_d_state=[6, 16, 32],
            mamba_d_conv=[2, 4],
            mamba_conv_bias=[True, False],
            mamba_proj_bias=[True, False],
            time_step_limit=[(0.0, float("inf")), (0.3, 0.9)],
        ),
    }


def hybrid_kinds(dice: random.Random, count: int) -> list[str]:
    kinds = [dice.choice([LINEAR, LINEAR, FULL]) for _ in range(count)]
    kinds[dice.randrange(count)] = FULL
    return kinds


def granite_hybrid(dice: random.Random, count: int) -> dict[str, Any]:
    more = pick(
        dice,
        num_local_experts=[0, 3],
        num_experts_per_tok=[1, 2],
        shared_intermediate_size=[24, 57],
        position_embedding_type=[None, "rope"],
        attention_bias=[True, False],
    )
    kinds = {"layer_types": hybrid_kinds(dice, count)}
    # Its heads follow from the hidden size.
    return {**granite(dice, count), **mamba_heads(dice), **more, **kinds}


def bamba(dice: random.Random, count: int) -> dict[str, Any]:
    kinds = hybrid_kinds(dice, count)
    indices = [index for index, kind in enumerate(kinds) if kind == FULL]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    chosen = {**biases(dice, count), **mamba_heads(dice)}
    return {**chosen, "attn_layer_indices": indices, "rope_parameters": rope}


def falcon_h1(dice: random.Random, count: int) -> dict[str, Any]:
    def some(num: int) -> list[float]:
        return [dice.choice([0.5, 0.8, 1.0, 1.7]) for _ in range(num)]

    names = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **mamba_heads(dice),
        **{f"{name}_multiplier": factor for name, factor in zip(names, some(7), strict=True)},
        **pick(
            dice,
            mamba_rms_norm=[True, False],
            mamba_norm_before_gate=[True, False],
            projectors_bias=[True, False],
            mlp_bias=[True, False],
            attention_bias=[True, False],
        ),
        "mamba_d_ssm": None,
        "ssm_multipliers": some(5),
        "mlp_multipliers": some(2),
    }


def nemotron_h(dice: random.Random, count: int) -> dict[str, Any]:
    kinds = [dice.choice([LINEAR, FULL, "mlp", "moe"]) for _ in range(count + 2)]
    heads, dim = dice.choice([(4, 16), (6, 10), (8, 24)])
    return {
        "layers_block_type": [LINEAR, FULL, *kinds],
        "num_hidden_layers": count + 4,
        "mamba_num_heads": heads,
        "mamba_head_dim": dim,
        **pick(
            dice,
            n_groups=[1, 2],
            ssm_state_size=[7, 16],
            conv_kernel=[2, 4],
            use_conv_bias=[True, False],
            use_bias=[True, False],
            mlp_bias=[True, False],
            layer_norm_epsilon=[1e-5, 1e-6],
            n_routed_experts=[3, 5],
            num_experts_per_tok=[1, 2],
            moe_intermediate_size=[16, 33],
            moe_shared_expert_intermediate_size=[16, 40],
            norm_topk_prob=[True, False],
            routed_scaling_factor=[1.0, 2.5],
        ),
    }


def jamba(dice: random.Random, count: int) -> dict[str, Any]:
    return pick(
        dice,
        attn_layer_period=[2],
        attn_layer_offset=[0],
        num_experts=[1, 3],
        num_experts_per_tok=[1, 2],
        mamba_d_state=[5, 16],
        mamba_d_conv=[2, 4],
        mamba_dt_rank=["auto", 3],
        mamba_conv_bias=[True, False],
        mamba_proj_bias=[True, False],
    )


def mamba(dice: random.Random, count: int) -> dict[str, Any]:
    return pick(
        dice,
        state_size=[5, 16],
        conv_kernel=[2, 4],
        expand=[1, 2],
        use_bias=[True, False],
        use_conv_bias=[True, False],
        time_step_rank=["auto", 3],
    )


def mamba2(dice: random.Random, count: int) -> dict[str, Any]:
    heads, dim = dice.choice([(4, 16), (6, 10), (8, 24)])
    sizes = pick(dice, state_size=[6, 16], conv_kernel=[2, 4], n_groups=[1, 2])
    return {"hidden_size": heads * dim // 2, "num_heads": heads, "head_dim": dim, **sizes}


OPTIONS = {
    "Bamba": bamba,
    "FalconH1": falcon_h1,
    "FalconMamba": mamba,
    "GraniteMoeHybrid": granite_hybrid,
    "Jamba": jamba,
    "Mamba": mamba,
    "Mamba2": mamba2,
    "NemotronH": nemotron_h,
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


@pytest.mark.parametrize("heads", [Heads(16, 1), Heads(24, 4)], ids=str)
def test_random_decoders_equal_transformers(tmp_path: Path, seed: int, heads: Heads) -> None:
    """Kernels of both sizes of heads are compiled for other tests, too; the second size is no
    multiple of a vector. The long form draws a size for every model."""
    dice = random.Random(seed)
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
