"""Cosine and sine tables for all types of rotary embeddings in transformers.

The types longrope and dynamic depend on the sequence length, for which transformers uses the
longest sequence of a call. That would rotate cached keys differently from new ones, so here
``max_model_len`` is used instead:

* longrope uses its long factors if ``max_model_len`` exceeds the original length;
* dynamic uses the base for ``max_model_len`` if that exceeds ``max_position_embeddings``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.layers.rope import RopeSpec


class Frequencies(NamedTuple):
    """Radians per position for each pair of dimensions (``inv_freq`` [rotary_dim / 2]), and a
    factor by which cosines and sines are multiplied."""

    inv_freq: torch.Tensor
    attention_factor: float = 1.0


def cos_sin_table(rope: RopeSpec, max_model_len: int) -> torch.Tensor:
    """Table [max_model_len, rotary_dim] float32: each row has the cosines, then the sines."""
    inv_freq, factor = frequencies(rope, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq
    table = torch.empty(max_model_len, 2 * inv_freq.numel(), dtype=torch.float32)
    half = inv_freq.numel()
    torch.cos(angles, out=table[:, :half]).mul_(factor)
    torch.sin(angles, out=table[:, half:]).mul_(factor)
    return table


def frequencies(rope: RopeSpec, max_model_len: int) -> Frequencies:
    """Frequencies of transformers' ROPE_INIT_FUNCTIONS for sequences of ``max_model_len``
    tokens."""
    return ROPE_TYPES[rope.rope_type](rope, max_model_len)


def _powers(theta: float, rotary_dim: int, of: int | None = None) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / (of or rotary_dim)
    return theta**exponents


def _default(rope: RopeSpec, max_model_len: int) -> Frequencies:
    return Frequencies(1.0 / _powers(rope.theta, rope.rotary_dim))


def _linear(rope: RopeSpec, max_model_len: int) -> Frequencies:
    return Frequencies(1.0 / _powers(rope.theta, rope.rotary_dim) / rope.scaling["factor"])


def _dynamic(rope: RopeSpec, max_model_len: int) -> Frequencies:
    dim, factor = rope.rotary_dim, rope.scaling["factor"]
    length = max(max_model_len, rope.max_position)
    stretch = factor * length / rope.max_position - (factor - 1)
    theta = rope.theta * stretch ** (dim / (dim - 2))
    return Frequencies(1.0 / _powers(theta, dim))


def _proportional(rope: RopeSpec, max_model_len: int) -> Frequencies:
    """Default frequencies for the first dimensions of a head, 0 for the rest."""
    num_rotated = int(rope.scaling.get("partial_rotary_factor", 1.0) * rope.head_dim // 2)
    inv_freq = torch.zeros(rope.head_dim // 2, dtype=torch.float32)
    inv_freq[:num_rotated] = 1.0 / _powers(rope.theta, 2 * num_rotated, rope.head_dim)
    return Frequencies(inv_freq / rope.scaling.get("factor", 1.0))


def _llama3(rope: RopeSpec, max_model_len: int) -> Frequencies:
    """Divide the frequencies of long wavelengths by ``factor``, keep those of short wavelengths,
    and interpolate in between."""
    scaling = rope.scaling
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    inv_freq = 1.0 / _powers(rope.theta, rope.rotary_dim)
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, blended)
    return Frequencies(torch.where(wavelength < original / high, inv_freq, stretched))


def _yarn(rope: RopeSpec, max_model_len: int) -> Frequencies:
    """Frequencies of YaRN, "NTK by parts" (arXiv 2309.00071)."""
    scaling, dim = rope.scaling, rope.rotary_dim
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or rope.max_position / original

    def dimension_of(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(rope.theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - interpolated
    powers = _powers(rope.theta, dim)
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return Frequencies(inv_freq, _yarn_attention_factor(rope, factor))


def _yarn_attention_factor(rope: RopeSpec, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.scaling.get("attention_factor")
    if given is not None:
        return float(given)
    weight, weight_all = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    if weight and weight_all:
        return mscale(weight) / mscale(weight_all)
    return mscale(1.0)


def _longrope(rope: RopeSpec, max_model_len: int) -> Frequencies:
    """Frequencies of LongRoPE: one factor per pair of dimensions (arXiv 2402.13753)."""
    scaling = rope.scaling
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or rope.max_position / original
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        stretched = factor > 1.0
        attention_factor = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
        )
    which = "long_factor" if max_model_len > original else "short_factor"
    factors = torch.tensor(scaling[which], dtype=torch.float32)
    powers = _powers(rope.theta, rope.rotary_dim)
    return Frequencies(1.0 / (factors * powers), float(attention_factor))


ROPE_TYPES: dict[str, Callable[[RopeSpec, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
