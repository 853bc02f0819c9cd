"""The rotary embedding of a GGUF file as config.json describes it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from engine.errors import ModelError
from engine.gguf.header import GgufTensor, damaged
from engine.gguf.meta import Meta

Config = dict[str, Any]

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What all published models of Llama 3's kind have; files do not state it."""
MAX_FACTORS = 1 << 16


def rope_scaling(meta: Meta, theta: float) -> Config:
    """Return the entries of config.json that scale rotary frequencies, from metadata or from
    factors stored as tensors; {} if there are none. theta: base of the frequencies."""
    if FREQUENCIES in meta.header.tensors:
        return {"rope_scaling": _of_frequencies(read_factors(meta, FREQUENCIES), theta)}
    if LONG in meta.header.tensors or SHORT in meta.header.tensors:
        return _longrope(meta)
    kind = meta.text("rope.scaling.type")
    if kind == "yarn" and meta.has("rope.scaling.factor"):
        return {"rope_scaling": _yarn(meta)}
    if kind == "linear" or (not kind and meta.has("rope.scale_linear")):
        key = "rope.scaling.factor" if kind else "rope.scale_linear"
        factor = meta.real(key, 1.0)
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}
    if kind not in ("", "none", "linear", "yarn", "longrope"):
        raise meta.wrong("rope.scaling.type", kind, "none, linear, yarn or longrope")
    return {}


def _yarn(meta: Meta) -> Config:
    scaling = {
        "rope_type": "yarn",
        "factor": meta.real("rope.scaling.factor"),
        "original_max_position_embeddings": meta.count(
            "rope.scaling.original_context_length", meta.count("context_length")
        ),
    }
    for theirs, ours in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if meta.has(f"rope.scaling.{theirs}"):
            scaling[ours] = meta.real(f"rope.scaling.{theirs}")
    multiplier = meta.real("rope.scaling.yarn_log_multiplier", 0.0, is_positive=False)
    if meta.architecture == "gpt-oss":
        scaling["truncate"] = False
    if multiplier > 0:
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return scaling


def _longrope(meta: Meta) -> Config:
    """The factors of short and long texts. The attention factor follows from the lengths."""
    long, short = read_factors(meta, LONG), read_factors(meta, SHORT)
    if len(long) != len(short):
        raise damaged(
            meta.header.path, f"{LONG} has {len(long)} elements, {SHORT} has {len(short)}"
        )
    original = meta.count(
        "rope.scaling.original_context_length", meta.count("context_length"), least=2
    )
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "long_factor": [float(str(each)) for each in long],
            "short_factor": [float(str(each)) for each in short],
        },
    }


def _of_frequencies(factors: np.ndarray[Any, Any], theta: float) -> Config:
    """The scaling that divides the frequencies by the given factors: that of Llama 3 if it gives
    these factors, otherwise longrope with the same factors for all lengths."""
    largest = float(factors.max())
    if largest > 1 and np.allclose(llama3_factors(largest, theta, len(factors)), factors, 1e-4):
        return {"rope_type": "llama3", "factor": float(str(factors.max())), **LLAMA3}
    each = [float(factor) for factor in factors]
    return {
        "rope_type": "longrope",
        "attention_factor": 1.0,
        "long_factor": each,
        "short_factor": each,
    }


def llama3_factors(factor: float, theta: float, count: int) -> np.ndarray[Any, Any]:
    """Divisors of ``count`` rotary frequencies in models of Llama 3's kind: 1 for short waves,
    ``factor`` for long ones, and a smooth transition."""
    waves = 2 * math.pi * theta ** (np.arange(count) / count)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = (LLAMA3["original_max_position_embeddings"] / waves - low) / (high - low)
    share = np.clip(share, 0.0, 1.0)
    return np.asarray(1 / ((1 - share) / factor + share))


def read_factors(meta: Meta, name: str) -> np.ndarray[Any, Any]:
    """Read the factors of rotary frequencies, float32 [pairs]. Raises ``ModelError``."""
    stored: GgufTensor | None = meta.header.tensors.get(name)
    if stored is None:
        raise damaged(meta.header.path, f"the tensor {name} is missing")
    is_valid = stored.type is GGMLQuantizationType.F32 and len(stored.shape) == 1
    if not is_valid or stored.shape[0] > MAX_FACTORS:
        raise damaged(stored.file, f"{name} of type {stored.type.name} has shape {stored.shape}")
    try:
        with stored.file.open("rb") as stream:
            stream.seek(stored.offset)
            content = stream.read(stored.num_bytes)
    except OSError as error:
        raise ModelError(f"{stored.file} cannot be read: {error.strerror}") from error
    if len(content) < stored.num_bytes:
        raise damaged(stored.file, f"it ends in {name}")
    factors = np.frombuffer(content, "<f4")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise damaged(stored.file, f"{name} has values that are not above 0")
    return factors
