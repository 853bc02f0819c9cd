"""The natively supported families of encoders, each described by a function from config.json to
``EncoderSpec``.

For missing keys, the defaults are those of the family's configuration class in transformers. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.encoder_spec import (
    EmbeddingSpec,
    EncoderLayerSpec,
    EncoderMLPSpec,
    EncoderNames,
    EncoderNormSpec,
    EncoderSpec,
    RelativeSpec,
)
from engine.models.hf_config import HF, NotNative, by_type, count, rope
from engine.models.spec import AttentionSpec

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "relu": "relu",
}

BERT = EncoderNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
MPNET = replace(
    BERT,
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    relative="encoder.relative_attention_bias",
)
MODERNBERT = EncoderNames(
    words="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
)
GATED = EncoderNames(
    layer="layers.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    mlp_norm="post_mlp_layernorm",
)
# The forms of the models' own repositories.
NOMIC = replace(
    GATED,
    embedding_norm="emb_ln",
    layer="encoder.layers.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)
NEW = replace(
    GATED,
    layer="encoder.layer.",
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    is_up_first=True,
    mlp_norm="mlp_ln",
)


def encoder_activation(hf: HF, key: str) -> str:
    """The engine's name for an encoder's activation. Raises ``NotNative`` if it has none."""
    name = hf.get(key) or "gelu"
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise NotNative(f"config.json's {key} is {name!r}, native encoders support {known}")
    return ACTIVATIONS[name]


def encoder_attention(hf: HF, *, bias: bool = True) -> AttentionSpec:
    """Attention with a KV head for each query head."""
    num_heads, hidden = count(hf, "num_attention_heads"), count(hf, "hidden_size")
    size = hf.get("head_dim") or hidden // num_heads
    if size * num_heads != hidden or size % 2:
        raise ModelError(
            f"config.json has hidden_size {hidden} and {num_heads} attention heads, which must be "
            "heads of an even size that together have the hidden size"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=size,
        scale=size**-0.5,
        qkv_bias=bias,
        out_bias=bias,
    )


def same_layers(hf: HF, layer: EncoderLayerSpec | None = None) -> tuple[EncoderLayerSpec, ...]:
    return (layer or EncoderLayerSpec(),) * count(hf, "num_hidden_layers")


def encoder(hf: HF, **differences: Any) -> EncoderSpec:
    """The spec of BERT. ``differences`` override fields of ``EncoderSpec``."""
    defaults: dict[str, Callable[[], Any]] = {
        "attention": lambda: encoder_attention(hf),
        "mlp": lambda: EncoderMLPSpec(
            intermediate_size=count(hf, "intermediate_size"),
            activation=encoder_activation(hf, "hidden_act"),
        ),
        "norm": lambda: EncoderNormSpec(eps=float(hf.get("layer_norm_eps", 1e-12))),
        "layers": lambda: same_layers(hf),
        "names": lambda: (BERT,),
    }
    missing = defaults.keys() - differences
    fields = {**differences, **{name: defaults[name]() for name in missing}}
    return EncoderSpec(
        vocab_size=count(hf, "vocab_size"), hidden_size=count(hf, "hidden_size"), **fields
    )


def check_positions(hf: HF) -> None:
    """Raise ``ModelError`` for positions that are not absolute, which BERT once supported."""
    kind = hf.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(
            f"config.json's position_embedding_type is {kind!r}, must be 'absolute'; other types "
            "are not supported"
        )
    if hf.get("is_decoder"):
        raise ModelError("config.json's is_decoder is true, but encoders look both ways")


def bert(hf: HF) -> EncoderSpec:
    check_positions(hf)
    hf = {"type_vocab_size": 2, "max_position_embeddings": 512, **hf}
    embedding = EmbeddingSpec(
        num_positions=count(hf, "max_position_embeddings"), num_types=hf["type_vocab_size"]
    )
    return encoder(hf, embedding=embedding, roots=("", "bert."))


def roberta(hf: HF) -> EncoderSpec:
    """The spec of RoBERTa and XLM-RoBERTa, whose positions begin after the padding's."""
    check_positions(hf)
    hf = {"type_vocab_size": 2, "max_position_embeddings": 512, "pad_token_id": 1, **hf}
    embedding = EmbeddingSpec(
        num_positions=count(hf, "max_position_embeddings"),
        first_position=int(hf["pad_token_id"]) + 1,
        num_types=hf["type_vocab_size"],
    )
    return encoder(hf, embedding=embedding, roots=("", "roberta."))


def mpnet(hf: HF) -> EncoderSpec:
    hf = {"max_position_embeddings": 512, "relative_attention_num_buckets": 32, **hf}
    embedding = EmbeddingSpec(num_positions=count(hf, "max_position_embeddings"), first_position=2)
    relative = RelativeSpec(num_buckets=count(hf, "relative_attention_num_buckets"))
    return encoder(hf, embedding=embedding, relative=relative, names=(MPNET,), roots=("", "mpnet."))


def modernbert(hf: HF) -> EncoderSpec:
    """The spec of ModernBERT, whose layers attend to a neighbourhood, every third one to all."""
    hf = {"max_position_embeddings": 8192, **hf}
    num, every = count(hf, "num_hidden_layers"), hf.get("global_attn_every_n_layers", 3)
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(num)
    ]
    near = EncoderLayerSpec(
        rope=rope(hf, "sliding_attention", theta=float(hf.get("local_rope_theta") or 10_000.0)),
        window=int(hf.get("local_attention", 128)) // 2 + 1,
    )
    full = EncoderLayerSpec(
        rope=rope(hf, "full_attention", theta=float(hf.get("global_rope_theta") or 160_000.0))
    )
    bias = bool(hf.get("mlp_bias", False))
    return encoder(
        hf,
        attention=encoder_attention(hf, bias=bool(hf.get("attention_bias", False))),
        mlp=EncoderMLPSpec(
            intermediate_size=count(hf, "intermediate_size"),
            activation=encoder_activation(hf, "hidden_activation"),
            is_gated=True,
            up_bias=bias,
            down_bias=bias,
        ),
        norm=EncoderNormSpec(
            eps=float(hf.get("norm_eps", 1e-5)),
            has_bias=bool(hf.get("norm_bias", False)),
            comes_first=True,
        ),
        layers=tuple(by_type(hf, kinds, {"sliding_attention": near, "full_attention": full})),
        names=(MODERNBERT,),
        roots=("", "model."),
    )


# Keys of config.json in nomic-ai's repositories, and of transformers.
NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Options of these repositories, and their only supported values.
NOMIC_NEEDS = {
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
}


def nomic(hf: HF) -> EncoderSpec:
    for key, only in NOMIC_NEEDS.items():
        if hf.get(key) is not None and hf[key] != only:
            raise ModelError(f"config.json's {key} is {hf[key]!r}, must be {only!r}")
    hf = {**{new: hf[old] for old, new in NOMIC_KEYS.items() if old in hf}, **hf}
    hf = {"type_vocab_size": 2, "hidden_act": "silu", "max_position_embeddings": 2048, **hf}
    return encoder(
        hf,
        attention=encoder_attention(hf, bias=False),
        mlp=gated_mlp(hf, down_bias=False),
        layers=same_layers(hf, EncoderLayerSpec(rope=rope(hf, theta=1000.0))),
        embedding=EmbeddingSpec(num_types=hf["type_vocab_size"]),
        names=(GATED, NOMIC),
        roots=("", "nomic_bert.", "bert."),
    )


# Options of Alibaba-NLP's repositories, and their only supported values.
GTE_NEEDS: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
}


def gte(hf: HF) -> EncoderSpec:
    """The spec of GTE, which Alibaba-NLP's repositories call "new"."""
    for key, only in GTE_NEEDS.items():
        if hf.get(key) is not None and hf[key] != only:
            raise ModelError(f"config.json's {key} is {hf[key]!r}, must be {only!r}")
    hf = {"type_vocab_size": 1, "hidden_act": "gelu", "max_position_embeddings": 8192, **hf}
    scaling = hf.get("rope_scaling") or {}
    if scaling.get("type") == "ntk":
        hf = with_ntk(hf, scaling)
    return encoder(
        hf,
        mlp=gated_mlp(hf, down_bias=True),
        layers=same_layers(hf, EncoderLayerSpec(rope=rope(hf, theta=160_000.0))),
        embedding=EmbeddingSpec(num_types=hf["type_vocab_size"]),
        names=(GATED, NEW),
        roots=("", "gte.", "new."),
    )


def with_ntk(hf: HF, scaling: HF) -> HF:
    """config.json with the same frequencies, those of GTE's "ntk" scaling, written as a larger base
    and a linear factor."""
    if scaling.get("mixed_b") is not None:
        raise ModelError(
            f"config.json's rope_scaling has mixed_b {scaling['mixed_b']!r}, which is not supported"
        )
    factor, attention = float(scaling["factor"]), encoder_attention(hf)
    linear = {"rope_type": "linear", "factor": factor ** (2 / attention.head_dim)}
    theta = float(hf.get("rope_theta") or 160_000.0) * factor
    return {**hf, "rope_scaling": linear, "rope_theta": theta}


def gated_mlp(hf: HF, *, down_bias: bool) -> EncoderMLPSpec:
    return EncoderMLPSpec(
        intermediate_size=count(hf, "intermediate_size"),
        activation=encoder_activation(hf, "hidden_act"),
        is_gated=True,
        up_bias=False,
        down_bias=down_bias,
    )


ENCODERS: dict[str, Callable[[HF], EncoderSpec]] = {
    "Bert": bert,
    "Roberta": roberta,
    "Camembert": roberta,
    "XLMRoberta": roberta,
    "MPNet": mpnet,
    "ModernBert": modernbert,
    "NomicBert": nomic,
    "Gte": gte,
    "New": gte,
}
"""By the first part of an architecture's name."""
ENDINGS = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForMaskedLM",
    "ForPreTraining",
)
"""Rests of architectures' names: the encoder alone, or with a head after it."""


def encoder_family(architecture: str) -> Callable[[HF], EncoderSpec] | None:
    """The family of an architecture, such as ``BertForSequenceClassification``; ``None`` if it is
    not a native encoder."""
    if architecture == "HF_ColBERT":
        return bert
    for ending in ENDINGS:
        if architecture.endswith(ending):
            return ENCODERS.get(architecture.removesuffix(ending))
    return None
