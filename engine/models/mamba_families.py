"""The native model families with Mamba layers. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.families import biased, decoder, granite, mlp
from engine.models.hf_config import HF, attention, by_type, check_silu, count, layers, rope
from engine.models.spec import (
    AttentionSpec,
    ChannelMambaSpec,
    DecoderLayerSpec,
    Factor,
    HeadMambaSpec,
    MixerKind,
    MLPSpec,
    MoESpec,
    NameSpec,
    NormSpec,
)
from engine.models.spec import DecoderSpec as Spec

KINDS: dict[str, MixerKind] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
}


def limits(hf: HF, key: str = "time_step_limit") -> tuple[float, float]:
    """The limits of time steps. JSON has no infinity: transformers writes an object instead."""
    given = hf.get(key) or (0.0, float("inf"))
    low, high = (float(one["__float__"] if isinstance(one, dict) else one) for one in given)
    return low, high


def heads(hf: HF, **differences: Any) -> HeadMambaSpec:
    """Mamba-2 as Bamba, Granite and Falcon-H1 name its sizes."""
    hf = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, **hf}
    width = int(hf.get("mamba_d_ssm") or hf.get("mamba_expand", 2) * count(hf, "hidden_size"))
    dim = hf.get("mamba_d_head", "auto")
    fields: dict[str, Any] = {
        "num_heads": count(hf, "mamba_n_heads"),
        "head_dim": width // count(hf, "mamba_n_heads") if dim in ("auto", None) else dim,
        "state_size": count(hf, "mamba_d_state"),
        "num_groups": count(hf, "mamba_n_groups"),
        "taps": count({"mamba_d_conv": 4, **hf}, "mamba_d_conv"),
        "conv_bias": bool(hf.get("mamba_conv_bias", True)),
        "bias": bool(hf.get("mamba_proj_bias", False)),
        "out_bias": bool(hf.get("mamba_proj_bias", False)),
        "dt_limits": limits(hf),
    }
    return checked(HeadMambaSpec(**(fields | differences)))


def checked(mamba: HeadMambaSpec) -> HeadMambaSpec:
    """The spec. Raises ``ModelError`` if its heads cannot be divided into its groups."""
    if mamba.num_heads % mamba.num_groups:
        raise ModelError(
            f"config.json has {mamba.num_heads} Mamba heads, not a multiple of its "
            f"{mamba.num_groups} groups"
        )
    return mamba


def granite_hybrid(hf: HF) -> Spec:
    """The spec of Granite 4 H: Mamba-2 or attention without positions, then a shared MLP and, in
    some models, experts."""
    check_silu(hf)
    types = hf.get("layer_types") or hf.get("layers_block_type")
    kinds = by_type(hf, types or ["mamba"] * count(hf, "num_hidden_layers"), KINDS)
    num_experts = hf.get("num_local_experts", 8) or 0
    shared = count({"shared_intermediate_size": 1024, **hf}, "shared_intermediate_size")
    table = rope(hf) if hf.get("position_embedding_type") == "rope" else None
    ropes = [table if kind == "attention" else None for kind in kinds]
    base = granite(hf)
    fields: dict[str, Any] = {
        "layers": layers(hf, ropes, 0, num_experts > 0, kinds),
        "mamba": heads(hf),
        "names": NameSpec(mlp="shared_mlp", gate_up="input_linear", down="output_linear"),
        "mlp": replace(base.mlp, intermediate_size=shared, bias=False),
    }
    if num_experts:
        fields["moe"] = MoESpec(
            num_experts=num_experts,
            top_k=hf.get("num_experts_per_tok", 2),
            intermediate_size=count(hf, "intermediate_size"),
            renormalize=True,
            shared_size=shared,
            shared_is_gated=False,
        )
    return replace(base, **fields)


def bamba(hf: HF) -> Spec:
    """The spec of Bamba: Mamba-2, and attention in some layers."""
    check_silu(hf)
    hf = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        **hf,
    }
    with_attention = set(hf.get("attn_layer_indices") or ())
    kinds: list[MixerKind] = [
        "attention" if i in with_attention else "mamba"
        for i in range(count(hf, "num_hidden_layers"))
    ]
    table = rope(hf, partial=0.5)
    ropes = [table if kind == "attention" else None for kind in kinds]
    return decoder(
        hf,
        attention=biased(hf),
        mlp=mlp(hf, bias=bool(hf.get("mlp_bias", False))),
        layers=layers(hf, ropes, mixer=kinds),
        mamba=heads(hf),
        **feed_forward_names(hf),
    )


def feed_forward_names(hf: HF) -> dict[str, Any]:
    """The norms and names that Bamba, Falcon-H1 and Jamba have in common."""
    eps = float(hf.get("rms_norm_eps", 1e-6))
    norm = NormSpec(eps=eps, mlp_in="pre_ff_layernorm", final="final_layernorm")
    return {"norm": norm, "names": NameSpec(mlp="feed_forward")}


def falcon_h1(hf: HF) -> Spec:
    """The spec of Falcon-H1: attention and Mamba-2 with the same input in each layer, and
    multipliers on most outputs."""
    check_silu(hf)
    hf = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        **hf,
    }
    mamba = heads(
        hf,
        has_norm=bool(hf.get("mamba_rms_norm", False)),
        norm_first=bool(hf.get("mamba_norm_before_gate", True)),
        out_bias=bool(hf.get("projectors_bias", False)),
    )
    layer = DecoderLayerSpec(rope=rope(hf), mixers=("mamba", "attention"))
    spec = decoder(
        hf,
        attention=biased(hf),
        mlp=mlp(hf, bias=bool(hf.get("mlp_bias", False))),
        layers=(layer,) * count(hf, "num_hidden_layers"),
        mamba=mamba,
        embedding_multiplier=multiplier(hf, "embedding"),
        logit_multiplier=multiplier(hf, "lm_head"),
        **feed_forward_names(hf),
    )
    return replace(spec, factors=falcon_factors(hf, spec, mamba))


def multiplier(hf: HF, name: str) -> float:
    return float(hf.get(f"{name}_multiplier") or 1.0)


def falcon_factors(hf: HF, spec: Spec, mamba: HeadMambaSpec) -> dict[str, tuple[Factor, ...]]:
    """The multipliers of Falcon-H1 on the outputs of its linear layers, where they are not 1."""
    a, size = spec.attention, spec.mlp.intermediate_size
    gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
    into, key = multiplier(hf, "attention_in"), multiplier(hf, "key")
    of_parts = hf.get("ssm_multipliers") or (1.0,) * 5
    groups = mamba.num_groups * mamba.state_size
    rows = (mamba.width, mamba.width, groups, groups, mamba.num_heads)
    enter = multiplier(hf, "ssm_in")
    found = {
        "qkv": (
            Factor(a.q_width, into, 1.0),
            Factor(a.kv_width, into * key, key),
            Factor(a.kv_width, into, 1.0),
        ),
        "out": (same_factor(spec.hidden_size, multiplier(hf, "attention_out")),),
        "mamba_in": tuple(
            Factor(num, enter * one, one) for num, one in zip(rows, of_parts, strict=True)
        ),
        "mamba_out": (same_factor(spec.hidden_size, multiplier(hf, "ssm_out")),),
        "gate_up": (same_factor(size, gate), same_factor(size, 1.0)),
        "down": (same_factor(spec.hidden_size, down),),
    }
    return {
        name: factors
        for name, factors in found.items()
        if any(factor[1:] != (1.0, 1.0) for factor in factors)
    }


def same_factor(num_rows: int, factor: float) -> Factor:
    return Factor(num_rows, float(factor), float(factor))


PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Types of layers by their letters in ``hybrid_override_pattern``."""


def nemotron_h(hf: HF) -> Spec:
    """The spec of Nemotron-H, each of whose layers is Mamba-2, attention, an MLP or experts."""
    hf = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21_504,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        **hf,
    }
    pattern = hf.get("hybrid_override_pattern")
    types = hf.get("layers_block_type") or hf.get("layer_types")
    if types is None:
        types = [PATTERN.get(letter, letter) for letter in pattern or "ME*-"]
    hf = {**hf, "num_hidden_layers": len(types)}
    without_mixer = {
        name: DecoderLayerSpec(rope=None, mixers=(), is_moe=name == "moe")
        for name in ("mlp", "moe")
    }
    with_mixer = {
        name: DecoderLayerSpec(rope=None, mixers=(kind,), has_mlp=False)
        for name, kind in KINDS.items()
    }
    specs = tuple(by_type(hf, types, without_mixer | with_mixer))
    relu = hf.get("mlp_hidden_act", "relu2")
    if relu != "relu2":
        raise ModelError(f"config.json's mlp_hidden_act is {relu!r}, must be 'relu2'")
    check_silu(hf, "mamba_hidden_act")
    bias = bool(hf.get("mlp_bias", False))
    return decoder(
        hf,
        attention=attention(hf),
        mlp=MLPSpec(
            intermediate_size=count(hf, "intermediate_size"),
            activation="relu2",
            bias=bias,
            is_gated=False,
        ),
        norm=NormSpec(
            eps=float(hf.get("layer_norm_epsilon", 1e-5)),
            attention_in="norm",
            mlp_in="norm",
            final="norm_f",
        ),
        names=NameSpec(
            mlp="mixer",
            attention="mixer",
            mamba="mixer",
            embedding="embeddings",
            roots=("backbone", "model"),
        ),
        layers=specs,
        moe=nemotron_experts(hf) if any(one.is_moe for one in specs) else None,
        mamba=checked(
            HeadMambaSpec(
                num_heads=count(hf, "mamba_num_heads"),
                head_dim=count(hf, "mamba_head_dim"),
                state_size=count(hf, "ssm_state_size"),
                num_groups=count(hf, "n_groups"),
                taps=count(hf, "conv_kernel"),
                conv_bias=bool(hf.get("use_conv_bias", True)),
                bias=bool(hf.get("use_bias", False)),
                out_bias=bool(hf.get("use_bias", False)),
                dt_limits=(float(hf.get("time_step_min", 0.001)), float("inf")),
            )
        ),
    )


def nemotron_experts(hf: HF) -> MoESpec:
    """The experts of Nemotron-H. Raises ``ModelError`` for experts in groups or with projections
    of their own, which are not supported."""
    for key, usual in (("n_group", 1), ("moe_latent_size", None)):
        if hf.get(key, usual) != usual:
            raise ModelError(
                f"config.json's {key} is {hf[key]!r}, only {usual!r} is supported for experts"
            )
    return MoESpec(
        num_experts=hf.get("n_routed_experts", 8),
        top_k=hf.get("num_experts_per_tok", 2),
        intermediate_size=hf.get("moe_intermediate_size", 7688),
        renormalize=bool(hf.get("norm_topk_prob", True)),
        renormalize_eps=1e-20,
        scoring="sigmoid",
        has_bias=True,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        shared_size=hf.get("moe_shared_expert_intermediate_size", 7688),
        shared_is_gated=False,
    )


def jamba(hf: HF) -> Spec:
    """The spec of Jamba: Mamba-1, attention without positions in some layers, and experts in
    some."""
    check_silu(hf)
    hf = {"num_key_value_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, **hf}
    num, hidden = count(hf, "num_hidden_layers"), count(hf, "hidden_size")
    period, offset = hf.get("attn_layer_period", 8), hf.get("attn_layer_offset", 4)
    kinds: list[MixerKind] = ["attention" if i % period == offset else "mamba" for i in range(num)]
    num_experts = hf.get("num_experts", 16)
    every, first = hf.get("expert_layer_period", 2), hf.get("expert_layer_offset", 1)
    sparse = [num_experts > 1 and i % every == first for i in range(num)]
    rank = hf.get("mamba_dt_rank", "auto")
    nowhere: list[Any] = [None] * num
    return decoder(
        hf,
        attention=attention(hf),
        mlp=mlp(hf),
        layers=layers(hf, nowhere, 0, sparse, kinds),
        mamba=ChannelMambaSpec(
            width=hf.get("mamba_expand", 2) * hidden,
            state_size=count(hf, "mamba_d_state"),
            rank=-(-hidden // 16) if rank == "auto" else rank,
            taps=count(hf, "mamba_d_conv"),
            conv_bias=bool(hf.get("mamba_conv_bias", True)),
            bias=bool(hf.get("mamba_proj_bias", False)),
            norms="stored",
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        ),
        moe=MoESpec(
            num_experts=num_experts,
            top_k=hf.get("num_experts_per_tok", 2),
            intermediate_size=count(hf, "intermediate_size"),
            renormalize=False,
        )
        if any(sparse)
        else None,
        **feed_forward_names(hf),
    )


def without_attention(hf: HF, mamba: HeadMambaSpec | ChannelMambaSpec, tied: bool) -> Spec:
    """The spec of a model whose layers are all Mamba. Its attention is only a size of keys and
    values, in which the engine counts tokens."""
    num = count(hf, "num_hidden_layers")
    layer = DecoderLayerSpec(rope=None, mixers=("mamba",), has_mlp=False)
    return decoder(
        hf,
        attention=AttentionSpec(
            num_heads=1,
            num_kv_heads=1,
            head_dim=unused_head_dim(num * mamba.width * mamba.state_size),
            scale=1.0,
        ),
        mlp=MLPSpec(intermediate_size=1, activation="silu"),
        norm=NormSpec(
            eps=float(hf.get("layer_norm_epsilon", 1e-5)), attention_in="norm", final="norm_f"
        ),
        names=NameSpec(mamba="mixer", embedding="embeddings", roots=("backbone", "model")),
        layers=(layer,) * num,
        mamba=mamba,
        tied=bool(hf.get("tie_word_embeddings", tied)),
    )


def unused_head_dim(num_numbers: int) -> int:
    """Size of a key for which a snapshot of states with this many numbers takes about 512 blocks of
    16 tokens."""
    return max(16, -(-num_numbers // (2 * 16 * 512 * 16)) * 16)


def mamba2(hf: HF) -> Spec:
    """The spec of Mamba-2, which has no attention."""
    check_silu(hf)
    hf = {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, **hf}
    bias = bool(hf.get("use_bias", False))
    mamba = HeadMambaSpec(
        num_heads=count(hf, "num_heads"),
        head_dim=count(hf, "head_dim"),
        state_size=count(hf, "state_size"),
        num_groups=count(hf, "n_groups"),
        taps=count({"conv_kernel": 4, **hf}, "conv_kernel"),
        conv_bias=bool(hf.get("use_conv_bias", True)),
        bias=bias,
        out_bias=bias,
        dt_limits=limits(hf),
    )
    return without_attention(hf, checked(mamba), tied=False)


def mamba(hf: HF, **differences: Any) -> Spec:
    """The spec of Mamba, which has no attention."""
    check_silu(hf)
    hf = {"state_size": 16, "conv_kernel": 4, **hf}
    hidden, rank = count(hf, "hidden_size"), hf.get("time_step_rank", "auto")
    spec = ChannelMambaSpec(
        width=int(hf.get("intermediate_size") or hf.get("expand", 2) * hidden),
        state_size=count(hf, "state_size"),
        rank=-(-hidden // 16) if rank == "auto" else rank,
        taps=count(hf, "conv_kernel"),
        conv_bias=bool(hf.get("use_conv_bias", True)),
        bias=bool(hf.get("use_bias", False)),
        **differences,
    )
    return without_attention(hf, spec, tied=True)


def falcon_mamba(hf: HF) -> Spec:
    """The spec of Falcon-Mamba: Mamba with norms of time steps, b and c."""
    return mamba(hf, norms="plain", norm_eps=float(hf.get("mixer_rms_eps", 1e-6)))


MAMBA_FAMILIES = {
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "BambaForCausalLM": bamba,
    "FalconH1ForCausalLM": falcon_h1,
    "NemotronHForCausalLM": nemotron_h,
    "JambaForCausalLM": jamba,
    "Mamba2ForCausalLM": mamba2,
    "MambaForCausalLM": mamba,
    "FalconMambaForCausalLM": falcon_mamba,
}
