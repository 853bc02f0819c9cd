"""Reads config.json as written by any version of transformers. Does not import torch.

Missing keys get the defaults of the family; a key that is present but null stays null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from engine.errors import ModelError
from engine.layers.rope import RopeSpec
from engine.models.spec import AttentionSpec, DecoderLayerSpec, MixerKind

HF = Mapping[str, Any]
T = TypeVar("T")

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Required parameters of each type of rotary embedding.
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": (),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class NotNative(ModelError):
    """A model of a native family that has an option which only transformers supports."""


def need(hf: HF, key: str) -> Any:
    """The value of a required key of config.json. Raises ``ModelError`` if it is missing."""
    if hf.get(key) is None:
        raise ModelError(f"config.json lacks {key!r}, which {hf.get('model_type')} needs")
    return hf[key]


def count(hf: HF, key: str) -> int:
    """The value of a key of config.json. Raises ``ModelError`` unless it is a positive integer."""
    value = need(hf, key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json's {key} is {value!r}, must be a whole number of at least 1")
    return value


def activation(hf: HF, key: str = "hidden_act") -> str:
    """The engine's name for the MLP's activation. Raises ``NotNative`` if it is not supported."""
    name = hf.get(key) or "silu"
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise NotNative(f"config.json's {key} is {name!r}, native MLPs support {known}")
    return ACTIVATIONS[name]


def check_silu(hf: HF, key: str = "hidden_act") -> None:
    """Raise ``ModelError`` if config.json has another activation than SiLU, the only one that
    convolutions before recurrent states support."""
    name = hf.get(key) or "silu"
    if ACTIVATIONS.get(name) != "silu":
        raise ModelError(
            f"config.json's {key} is {name!r}, must be 'silu', since the layers with recurrent "
            "states support no other activation"
        )


def head_dim(hf: HF) -> int:
    """Size of an attention head. Raises ``ModelError`` if it is odd, as rotation needs pairs."""
    if hf.get("head_dim") is not None:
        size = count(hf, "head_dim")
    else:
        size = count(hf, "hidden_size") // count(hf, "num_attention_heads")
    if size % 2 or not size:
        raise ModelError(f"config.json implies heads of size {size}, must be even and at least 2")
    return size


def heads(hf: HF, num_ranks: int = 1) -> tuple[int, int] | None:
    """Head size and number of query heads per KV head of a rank; ``None`` if config.json lacks
    them."""
    try:
        found = attention(hf)
    except ModelError:
        return None
    group = found.num_heads // found.num_kv_heads
    return found.head_dim, min(group, max(1, found.num_heads // num_ranks))


def attention(hf: HF, **differences: Any) -> AttentionSpec:
    """The attention spec. ``differences`` override fields of ``AttentionSpec``."""
    num_heads = count(hf, "num_attention_heads")
    num_kv_heads = count({"num_key_value_heads": num_heads, **_stated(hf)}, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json has {num_heads} attention heads, not a multiple of its {num_kv_heads} "
            "key-value heads"
        )
    fields = {"scale": head_dim(hf) ** -0.5, **differences}
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim(hf), **fields
    )


def rope(
    hf: HF, layer_type: str | None = None, *, theta: float = 10_000.0, partial: float | None = None
) -> RopeSpec:
    """Read the rotary embedding, or the one for ``layer_type`` if config.json has one for each
    type.

    theta: default base. partial: default fraction of a head's dimensions that are rotated; with
    ``None``, embeddings of type "default" rotate all dimensions whatever config.json has.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if layer_type is not None and layer_type in given:
        given = given[layer_type] or {}
    scaling = {key: value for key, value in given.items() if value is not None}
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    scaling["original_max_position_embeddings"] = (
        hf.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_position(hf)
    )
    _check_rope(rope_type, scaling)
    share = scaling.get("partial_rotary_factor", partial or 1.0)
    if partial is None and rope_type == "default":
        share = 1.0
    return RopeSpec(
        rope_type=rope_type,
        theta=float(scaling.get("rope_theta") or hf.get("rope_theta") or theta),
        head_dim=head_dim(hf),
        rotary_dim=head_dim(hf) if rope_type == "proportional" else int(head_dim(hf) * share),
        max_position=max_position(hf),
        scaling=scaling,
    )


def with_axes(hf: HF, sections: list[int], *, are_interleaved: bool) -> HF:
    """The config with rotary positions along the axes time, height and width. sections: default
    numbers of pairs of dimensions of each axis."""
    given = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if (given.get("rope_type") or given.get("type")) == "mrope":
        given["rope_type"] = "default"
    axes = {"mrope_section": sections, **given, "mrope_interleaved": are_interleaved}
    return {**hf, "rope_scaling": axes}


def _check_rope(rope_type: str, scaling: Mapping[str, Any]) -> None:
    if rope_type not in ROPE_NEEDS:
        raise ModelError(
            f"config.json has rotary embeddings of type {rope_type!r}; "
            f"supported: {', '.join(ROPE_NEEDS)}"
        )
    missing = [key for key in ROPE_NEEDS[rope_type] if scaling.get(key) is None]
    if missing:
        raise ModelError(f"config.json's {rope_type} rotary embedding lacks {', '.join(missing)}")


def max_position(hf: HF) -> int:
    return count({"max_position_embeddings": 2048, **_stated(hf)}, "max_position_embeddings")


def _stated(hf: HF) -> dict[str, Any]:
    """The entries of config.json whose value is not null."""
    return {key: value for key, value in hf.items() if value is not None}


def layer_types(hf: HF, default: list[str]) -> list[str]:
    """The type of each layer, "full_attention" or "sliding_attention". default: used if config.json
    has no layer_types."""
    known = {name: name for name in ("full_attention", "sliding_attention")}
    return by_type(hf, hf.get("layer_types") or default, known)


def by_type(hf: HF, types: Sequence[str], known: Mapping[str, T]) -> list[T]:
    """The value in ``known`` for the type of each layer. Raises ``ModelError`` if a type is unknown
    or the number of types is not that of layers."""
    num = count(hf, "num_hidden_layers")
    if len(types) != num or set(types) - set(known):
        raise ModelError(
            f"config.json's layer_types {list(types)} must name {' or '.join(known)} for each of "
            f"its {num} layers"
        )
    return [known[kind] for kind in types]


def windows(hf: HF, types: list[str]) -> list[int]:
    """Sliding window of each layer, 0 for full attention."""
    size = int(hf.get("sliding_window") or 0)
    return [size if kind == "sliding_attention" else 0 for kind in types]


def layers(
    hf: HF,
    rope: RopeSpec | list[RopeSpec | None],
    window: int | list[int] = 0,
    is_moe: bool | list[bool] = False,
    mixer: MixerKind | list[MixerKind] = "attention",
) -> tuple[DecoderLayerSpec, ...]:
    """The layers' specs. Each argument is one value for all layers or a list with one per layer."""
    num = count(hf, "num_hidden_layers")
    columns = [v if isinstance(v, list) else [v] * num for v in (rope, window, is_moe, mixer)]
    return tuple(
        DecoderLayerSpec(rope=rope, window=window, is_moe=is_moe, mixers=(mixer,))
        for rope, window, is_moe, mixer in zip(*columns, strict=True)
    )
