"""The natively supported model families, each described by its differences from Llama.

To add one, write a function from config.json to ``DecoderSpec`` and add it to ``FAMILIES``. For
missing keys, the defaults are those of the family's configuration class in transformers. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.hf_config import (
    HF,
    activation,
    attention,
    by_type,
    check_silu,
    count,
    layer_types,
    layers,
    rope,
    windows,
    with_axes,
)
from engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaSpec,
    MixerKind,
    MLPSpec,
    MoESpec,
    NameSpec,
    NormSpec,
    ShortConvSpec,
)


def decoder(hf: HF, **differences: Any) -> DecoderSpec:
    """The spec of a Llama model without biases. ``differences`` override fields of
    ``DecoderSpec``."""
    # A file need not have what only an unused default reads.
    defaults: dict[str, Callable[[], Any]] = {
        "attention": lambda: attention(hf),
        "mlp": lambda: mlp(hf),
        "norm": lambda: NormSpec(eps=float(hf.get("rms_norm_eps", 1e-6))),
        "tied": lambda: bool(hf.get("tie_word_embeddings", False)),
        "layers": lambda: layers(hf, rope(hf)),
    }
    missing = defaults.keys() - differences
    fields = {**differences, **{name: defaults[name]() for name in missing}}
    return DecoderSpec(
        vocab_size=count(hf, "vocab_size"), hidden_size=count(hf, "hidden_size"), **fields
    )


def mlp(hf: HF, **differences: Any) -> MLPSpec:
    if "activation" not in differences:
        differences["activation"] = activation(hf)
    return MLPSpec(intermediate_size=count(hf, "intermediate_size"), **differences)


def biased(hf: HF, **differences: Any) -> AttentionSpec:
    """Attention whose four projections have biases if config.json sets ``attention_bias``."""
    bias = bool(hf.get("attention_bias", False))
    return attention(hf, qkv_bias=bias, out_bias=bias, **differences)


def llama(hf: HF) -> DecoderSpec:
    return decoder(hf, attention=biased(hf), mlp=mlp(hf, bias=bool(hf.get("mlp_bias", False))))


def mistral(hf: HF) -> DecoderSpec:
    """The spec of Mistral, and of Ministral, whose config.json has ``layer_types``."""
    hf = {"num_key_value_heads": 8, "sliding_window": 4096, **hf}
    kinds = layer_types(hf, ["sliding_attention"] * count(hf, "num_hidden_layers"))
    return decoder(hf, layers=layers(hf, rope(hf), windows(hf, kinds)))


def qwen2_windows(hf: HF) -> list[int]:
    if not hf.get("use_sliding_window"):
        return [0] * count(hf, "num_hidden_layers")
    hf = {"sliding_window": 4096, "max_window_layers": 28, **hf}
    kinds = [
        "sliding_attention" if i >= hf["max_window_layers"] else "full_attention"
        for i in range(count(hf, "num_hidden_layers"))
    ]
    return windows(hf, layer_types(hf, kinds))


def qwen2(hf: HF) -> DecoderSpec:
    return decoder(
        hf,
        attention=attention(hf, qkv_bias=True),
        layers=layers(hf, rope(hf), qwen2_windows(hf)),
    )


def qwen3(hf: HF) -> DecoderSpec:
    hf = {"head_dim": 128, **hf}
    return decoder(
        hf,
        attention=biased(hf, qk_norm="head"),
        layers=layers(hf, rope(hf), qwen2_windows(hf)),
    )


def qwen3_moe(hf: HF) -> DecoderSpec:
    hf = {"num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1, **hf}
    num_experts = hf.get("num_experts", hf.get("num_local_experts", 128))
    window = hf["sliding_window"] if hf.get("use_sliding_window") else 0
    dense = set(hf.get("mlp_only_layers") or ())
    sparse = [
        num_experts > 0 and i not in dense and (i + 1) % hf["decoder_sparse_step"] == 0
        for i in range(count(hf, "num_hidden_layers"))
    ]
    return decoder(
        hf,
        attention=biased(hf, qk_norm="head"),
        layers=layers(hf, rope(hf), window or 0, sparse),
        moe=MoESpec(
            num_experts=num_experts,
            top_k=hf.get("num_experts_per_tok", 8),
            intermediate_size=hf.get("moe_intermediate_size", 768),
            renormalize=bool(hf.get("norm_topk_prob", False)),
        ),
    )


def mixtral(hf: HF) -> DecoderSpec:
    hf = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **hf}
    return decoder(
        hf,
        layers=layers(hf, rope(hf, theta=1e6), hf.get("sliding_window") or 0, True),
        moe=MoESpec(
            num_experts=hf.get("num_local_experts", 8),
            top_k=hf.get("num_experts_per_tok", 2),
            intermediate_size=count(hf, "intermediate_size"),
            renormalize=True,
        ),
    )


def phi3(hf: HF) -> DecoderSpec:
    hf = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **hf}
    partial = hf.get("partial_rotary_factor") or 1.0
    table = rope(_phi3_rope_names(hf), partial=partial)
    return decoder(hf, layers=layers(hf, table, hf.get("sliding_window") or 0))


def _phi3_rope_names(hf: HF) -> HF:
    """Map old names of longrope ("su", "yarn") and add the default original length."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = dict(hf.get(key) or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    given["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    return {"original_max_position_embeddings": 4096, **hf, key: given}


GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def gemma(hf: HF, **differences: Any) -> DecoderSpec:
    """The common parts of Gemma 2 and 3: norms before and after each sublayer, scaled
    embeddings."""
    return decoder(
        hf,
        mlp=mlp(hf, activation=activation(hf, "hidden_activation")),
        norm=NormSpec(
            eps=float(hf.get("rms_norm_eps", 1e-6)),
            add_one=True,
            attention_out="post_attention_layernorm",
            mlp_in="pre_feedforward_layernorm",
            mlp_out="post_feedforward_layernorm",
        ),
        embedding_multiplier=count(hf, "hidden_size") ** 0.5,
        logit_softcap=hf.get("final_logit_softcapping") or 0.0,
        **differences,
    )


def gemma_attention(hf: HF, **differences: Any) -> AttentionSpec:
    return biased(hf, scale=hf["query_pre_attn_scalar"] ** -0.5, **differences)


def gemma2(hf: HF) -> DecoderSpec:
    hf = {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **hf}
    sizes = windows(hf, layer_types(hf, alternating(hf, 2)))
    return gemma(
        hf,
        attention=gemma_attention(hf, softcap=hf["attn_logit_softcapping"] or 0.0),
        layers=layers(hf, rope(hf), sizes),
    )


def gemma3(hf: HF) -> DecoderSpec:
    hf = {**GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, **hf}
    # Layers with a window have their own rotary base and no scaling.
    local = {**hf, "rope_scaling": None, "rope_theta": hf.get("rope_local_base_freq")}
    ropes = {
        "full_attention": rope(hf, "full_attention", theta=1e6),
        "sliding_attention": rope(local, "sliding_attention"),
    }
    kinds = layer_types(hf, alternating(hf, hf.get("sliding_window_pattern") or 6))
    if hf.get("use_bidirectional_attention"):  # half of the window is for later tokens
        hf = {**hf, "sliding_window": int(hf.get("sliding_window") or 4096) // 2 + 1}
    return gemma(
        hf,
        # Files may contain Gemma 2's cap on scores, which transformers does not apply either.
        attention=gemma_attention(hf, qk_norm="head"),
        layers=layers(hf, [ropes[kind] for kind in kinds], windows(hf, kinds)),
    )


def alternating(hf: HF, every: int) -> list[str]:
    """The type of each layer: full attention in every ``every``-th, else a sliding window."""
    return [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention"
        for i in range(count(hf, "num_hidden_layers"))
    ]


def olmo2(hf: HF) -> DecoderSpec:
    return decoder(
        hf,
        attention=biased(hf, qk_norm="full"),
        norm=NormSpec(
            eps=float(hf.get("rms_norm_eps", 1e-5)),
            attention_in=None,
            attention_out="post_attention_layernorm",
            mlp_in=None,
            mlp_out="post_feedforward_layernorm",
        ),
    )


def granite(hf: HF) -> DecoderSpec:
    return replace(
        llama(hf),
        attention=biased(hf, scale=hf.get("attention_multiplier", 1.0)),
        embedding_multiplier=hf.get("embedding_multiplier", 1.0),
        residual_multiplier=hf.get("residual_multiplier", 1.0),
        logit_multiplier=1.0 / hf.get("logits_scaling", 1.0),
    )


def smollm3(hf: HF) -> DecoderSpec:
    hf = {"num_key_value_heads": 4, "tie_word_embeddings": True, **hf}
    num_layers = count(hf, "num_hidden_layers")
    every = hf.get("no_rope_layer_interval") or 4
    has_rope = hf.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(num_layers)]
    has_windows = bool(hf.get("use_sliding_window"))
    kinds = [
        "sliding_attention" if has_windows and not on else "full_attention"
        for on in has_rope[:num_layers]
    ]
    table = rope(hf, theta=2e6)
    ropes = [table if on else None for on in has_rope[:num_layers]]
    return replace(llama(hf), layers=layers(hf, ropes, windows(hf, layer_types(hf, kinds))))


def lfm2(hf: HF, **differences: Any) -> DecoderSpec:
    """The spec of LFM2: short convolutions, and attention in some layers."""
    hf = {"num_key_value_heads": 8, "max_position_embeddings": 128_000, **hf}
    size = hf.get("block_ff_dim") or hf.get("intermediate_size") or 12_288
    kinds = short_conv_layers(hf)
    return decoder(
        hf,
        **{
            "attention": attention(hf, qk_norm="head"),
            "mlp": MLPSpec(intermediate_size=lfm2_mlp_size(hf, size), activation="silu"),
            "norm": NormSpec(
                eps=float(hf.get("norm_eps", 1e-5)),
                attention_in="operator_norm",
                mlp_in="ffn_norm",
                final="embedding_norm",
            ),
            "names": NameSpec(
                prefix=text_prefix(hf),
                attention_out="out_proj",
                q_norm="q_layernorm",
                k_norm="k_layernorm",
                mlp="feed_forward",
                gate="w1",
                up="w3",
                down="w2",
            ),
            "layers": layers(hf, rope(hf, theta=1e6), mixer=kinds),
            "short_conv": ShortConvSpec(
                width=count(hf, "hidden_size"),
                taps=count({"conv_L_cache": 3, **hf}, "conv_L_cache"),
                bias=bool(hf.get("conv_bias", False)),
            ),
            "tied": bool(hf.get("tie_embedding", hf.get("tie_word_embeddings", True))),
            **differences,
        },
    )


def short_conv_layers(hf: HF) -> list[MixerKind]:
    """The mixer of each layer of LFM2, by ``layer_types`` or the older ``full_attn_idxs``."""
    num = count(hf, "num_hidden_layers")
    known: dict[str, MixerKind] = {"conv": "short_conv", "full_attention": "attention"}
    types = hf.get("layer_types")
    if types is None:
        with_attention = hf.get("full_attn_idxs")
        chosen = range(num) if with_attention is None else with_attention
        types = ["full_attention" if i in chosen else "conv" for i in range(num)]
    return by_type(hf, types, known)


def lfm2_mlp_size(hf: HF, size: int) -> int:
    """Intermediate size of LFM2's MLPs: ``size``, reduced and rounded up as config.json says."""
    if not hf.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor = 2 * size // 3, hf.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = count({"block_multiple_of": 256, **hf}, "block_multiple_of")
    return -(-int(factor * size) // multiple) * multiple


def lfm2_moe(hf: HF) -> DecoderSpec:
    """The spec of LFM2 with experts in all layers but the first."""
    num, dense = count(hf, "num_hidden_layers"), int(hf.get("num_dense_layers", 2))
    hf = {"intermediate_size": 7168, "num_key_value_heads": 8, **hf}
    table = rope({"max_position_embeddings": 128_000, **hf}, theta=1e6)
    return lfm2(
        hf,
        mlp=mlp(hf, activation="silu"),
        layers=layers(hf, table, 0, [i >= dense for i in range(num)], short_conv_layers(hf)),
        moe=MoESpec(
            num_experts=hf.get("num_experts", 32),
            top_k=hf.get("num_experts_per_tok", 4),
            intermediate_size=hf.get("moe_intermediate_size", 1792),
            renormalize=bool(hf.get("norm_topk_prob", True)),
            renormalize_eps=1e-6,
            scoring="sigmoid",
            has_bias=bool(hf.get("use_expert_bias", True)),
            scale=float(hf.get("routed_scaling_factor", 1.0)),
        ),
    )


def qwen3_next(hf: HF) -> DecoderSpec:
    """The spec of Qwen3-Next: the gated delta rule, and gated attention in every fourth layer."""
    hf = {"decoder_sparse_step": 1, "num_experts_per_tok": 10, **hf}
    num_experts, dense = hf.get("num_experts", 512), set(hf.get("mlp_only_layers") or ())
    sparse = [
        num_experts > 0 and i not in dense and (i + 1) % hf["decoder_sparse_step"] == 0
        for i in range(count(hf, "num_hidden_layers"))
    ]
    moe = shared_moe(hf, num_experts, renormalize=bool(hf.get("norm_topk_prob", True)))
    return gated_delta(hf, sparse, moe=moe)


def qwen3_5(hf: HF) -> DecoderSpec:
    """The spec of Qwen3.5: Qwen3-Next without experts."""
    hf = with_axes(hf, [11, 11, 10], are_interleaved=True)
    return gated_delta({"num_key_value_heads": 4, **hf}, False)


def qwen3_5_moe(hf: HF) -> DecoderSpec:
    """The spec of Qwen3.5 with experts in all layers."""
    hf = {"intermediate_size": 1, "num_experts_per_tok": 8, **hf}
    hf = with_axes(hf, [11, 11, 10], are_interleaved=True)
    moe = shared_moe(hf, hf.get("num_experts", 256), renormalize=True)
    return gated_delta(hf, True, moe=moe)


def shared_moe(hf: HF, num_experts: int, *, renormalize: bool) -> MoESpec:
    """The experts of Qwen3-Next, with a shared one that all tokens use."""
    return MoESpec(
        num_experts=num_experts,
        top_k=hf["num_experts_per_tok"],
        intermediate_size=hf.get("moe_intermediate_size", 512),
        renormalize=renormalize,
        shared_size=hf.get("shared_expert_intermediate_size", 512),
    )


def gated_delta(hf: HF, is_moe: bool | list[bool], **differences: Any) -> DecoderSpec:
    """The common parts of Qwen3-Next and Qwen3.5. is_moe: True for layers with experts."""
    hf = {"num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768, **hf}
    check_silu(hf)
    share = hf.get("partial_rotary_factor")
    table = rope(hf, partial=0.25 if share is None else share)
    return decoder(
        hf,
        attention=biased(hf, qk_norm="head", has_gate=True),
        norm=NormSpec(eps=float(hf.get("rms_norm_eps", 1e-6)), add_one=True),
        names=NameSpec(prefix=text_prefix(hf)),
        layers=layers(hf, table, 0, is_moe, gated_delta_layers(hf)),
        gated_delta=delta_of(hf),
        **differences,
    )


def delta_of(hf: HF) -> GatedDeltaSpec:
    """Sizes of the gated delta rule. Raises ``ModelError`` if key heads cannot be shared evenly."""
    sizes = {"key_head_dim": 128, "value_head_dim": 128, "num_key_heads": 16, "num_value_heads": 32}
    hf = {"linear_conv_kernel_dim": 4, **{f"linear_{key}": v for key, v in sizes.items()}, **hf}
    key_heads, value_heads = (count(hf, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise ModelError(
            f"config.json's linear_num_value_heads is {value_heads}, must be a multiple of its "
            f"linear_num_key_heads, {key_heads}"
        )
    return GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=count(hf, "linear_key_head_dim"),
        value_dim=count(hf, "linear_value_head_dim"),
        taps=count(hf, "linear_conv_kernel_dim"),
    )


def gated_delta_layers(hf: HF) -> list[MixerKind]:
    """The mixer of each layer, by ``layer_types`` or ``full_attention_interval``."""
    num = count(hf, "num_hidden_layers")
    every = count({"full_attention_interval": 4, **hf}, "full_attention_interval")
    types = hf.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num)
    ]
    known: dict[str, MixerKind] = {
        "linear_attention": "gated_delta",
        "full_attention": "attention",
    }
    return by_type(hf, types, known)


def text_prefix(hf: HF) -> str:
    """Prefix of the text model's tensors, which is longer in a model of images and text."""
    return "model.language_model." if "text_config" in hf else "model."


FAMILIES: dict[str, Callable[[HF], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MinistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Phi3ForCausalLM": phi3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Olmo2ForCausalLM": olmo2,
    "GraniteForCausalLM": granite,
    "SmolLM3ForCausalLM": smollm3,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "Lfm2VlForConditionalGeneration": lfm2,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
}
