"""Checks from config and class, before weights are loaded, whether a model can be served."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    LinearAttentionCacheLayerMixin,
)

from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ModelError

# Layer types whose only state is one key and one value per token.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

# Layer types with a recurrent state in transformers' cache, alone or next to keys and values.
STATE_LAYERS = frozenset(
    name
    for name, layer in DYNAMIC_LAYER_TYPE_MAPPING.items()
    if issubclass(layer, LinearAttentionCacheLayerMixin)
)
NO_CACHE_LAYERS = frozenset({"moe", "mlp"})
STATE_FAMILIES = (
    "LFM2, Qwen3-Next, Qwen3.5, Granite 4 H, Bamba, Falcon-H1, Nemotron-H, Jamba, Mamba, Mamba-2, "
    "Falcon-Mamba, Zamba2, Kimi-Linear and OLMo-hybrid"
)


class Misfit(ValueError):
    """The reason why a model cannot be served; ``refusal`` adds the model's name."""


def name_of(info: ModelInfo) -> str:
    return info.architecture or info.model_type


def refusal(info: ModelInfo, reason: object) -> ModelError:
    return ModelError(
        f"{name_of(info)} in {info.path} is not supported: {reason}. Supported are the native "
        "families, and decoder-only models of transformers whose attention can be replaced"
    )


def read_hf_config(config: ModelConfig, info: ModelInfo) -> PreTrainedConfig:
    """Load config.json with transformers. Raises ``ModelError``."""
    try:
        return AutoConfig.from_pretrained(
            info.path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        raise ModelError(
            f"transformers cannot read {info.path / 'config.json'} "
            f"({name_of(info)}): {_reason(error)}"
        ) from error


def check_support(config: ModelConfig, info: ModelInfo, hf: PreTrainedConfig) -> None:
    """Raise ``ModelError`` with the reason if the config shows that the model cannot be served."""
    for option in ("quantization", "output_layer_quantization"):
        value = getattr(config, option)
        if value is not None:
            raise ModelError(
                f"{option}={value!r} works only with native families, and {name_of(info)} is "
                f"computed by transformers; leave {option} out"
            )
    try:
        _check_config(hf)
        if not _is_remote(config, hf):
            cls = causal_class(hf)
            if info.architecture not in ("", cls.__name__):
                raise Misfit(
                    f"transformers creates a {cls.__name__} from a {hf.model_type!r} config"
                )
            check_class(cls, hf)
    except Misfit as reason:
        raise refusal(info, reason) from None


def _is_remote(config: ModelConfig, hf: PreTrainedConfig) -> bool:
    return config.trust_remote_code and "AutoModelForCausalLM" in (
        getattr(hf, "auto_map", {}) or {}
    )


def _check_config(hf: PreTrainedConfig) -> None:
    if getattr(hf, "is_encoder_decoder", False):
        raise Misfit("it is an encoder-decoder model")
    if getattr(hf, "add_cross_attention", False):
        raise Misfit("it attends to the output of an encoder")
    others = layer_types(hf) - ATTENTION_LAYERS - STATE_LAYERS - NO_CACHE_LAYERS
    if others:
        raise Misfit(f"it has layers other than attention ({', '.join(sorted(others))})")


def layer_types(hf: PreTrainedConfig) -> set[str]:
    """Layer types that a config names; may be empty."""
    return set(getattr(hf.get_text_config(decoder=True), "layer_types", None) or ())


def causal_class(hf: PreTrainedConfig) -> type[Any]:
    """The class that transformers would create from a config."""
    known = AutoModelForCausalLM._model_mapping
    if type(hf) not in known:
        raise Misfit("transformers has no causal language model for it")
    found = known[type(hf)]
    if not isinstance(found, tuple):
        return found
    named = [cls for cls in found if cls.__name__ in (hf.architectures or ())]
    return named[0] if named else found[0]


def check_class(cls: type[Any], hf: PreTrainedConfig) -> None:
    """Raise ``Misfit`` if the class shows that its attention cannot be replaced."""
    types = layer_types(hf)
    is_stateful = getattr(cls, "_is_stateful", False) and not types
    if is_stateful or (types & STATE_LAYERS and not _uses_cache_layers(cls)):
        raise Misfit(
            "it keeps a recurrent state, but not in the LinearAttentionLayer of transformers' "
            f"cache, as is needed. Families with recurrent states that run are {STATE_FAMILIES}"
        )
    if not cls._can_set_attn_implementation():
        raise Misfit("its attention does not go through transformers' attention interface")


def _uses_cache_layers(cls: type[Any]) -> bool:
    """True if the code of a class stores states in a ``LinearAttentionLayer``."""
    code = inspect.getsource(sys.modules[cls.__module__])
    return "update_conv_state" in code or "update_recurrent_state" in code


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            "the directory contains its own code; set trust_remote_code=True to run it, if you "
            "trust it"
        )
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
