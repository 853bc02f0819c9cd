"""Reads a checkpoint's scales of keys and values for a KV cache of 8-bit floats.

The cache stores x / scale. Calibration tools (compressed-tensors, AutoFP8, ModelOpt) write
`k_scale` and `v_scale` per layer, next to its projections or within them; older ones write one
`kv_scale` for both.
"""

from __future__ import annotations

import re

import torch

from engine.errors import ModelError
from engine.models.checkpoint import Checkpoint
from engine.models.spec import DecoderSpec

NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "attn.{0}_scale")
FOR_BOTH = "kv_scale"
SCALE = re.compile(
    r"\.self_attn\.((attn\.|[kv]_proj\.)?[kv]_scale|[kv]_proj\.output_scale|kv_scale)$"
)


def is_kv_scale(name: str) -> bool:
    """True if a tensor name is that of a K or V scale."""
    return SCALE.search(name) is not None


def kv_scales(
    checkpoint: Checkpoint, spec: DecoderSpec, heads: range | None = None
) -> list[torch.Tensor | None]:
    """K and V scales of each layer, [2, Hkv] float32, or ``None`` if the layer has none. heads: the
    KV heads that are wanted, ``None`` for all.

    Raises ``ModelError`` for a scale that is not one positive number, or one for each KV head.
    """
    num_heads, found = spec.attention.num_kv_heads, list[torch.Tensor | None]()
    for index in range(len(spec.layers)):
        place = f"{spec.names.prefix}layers.{index}.self_attn."
        both = [_scale(checkpoint, place, letter, num_heads) for letter in "kv"]
        has_some = any(scale is not None for scale in both)
        ones = torch.ones(num_heads)
        rows = [ones if scale is None else scale for scale in both]
        scales = torch.stack(rows)
        if heads is not None:
            scales = scales[:, heads.start : heads.stop].contiguous()
        found.append(scales if has_some else None)
    return found


def _scale(checkpoint: Checkpoint, place: str, letter: str, num_heads: int) -> torch.Tensor | None:
    names = [place + name.format(letter) for name in (*NAMES, FOR_BOTH)]
    stored = next((name for name in names if name in checkpoint.tensors), None)
    if stored is None:
        return None
    scale = checkpoint.tensor(stored).float().flatten()
    is_valid = bool((scale.isfinite() & (scale > 0)).all())
    if len(scale) not in (1, num_heads) or not is_valid:
        raise ModelError(
            f"{stored} in {checkpoint.root} is {scale.tolist()!r:.80}, must be one number above "
            f"zero, or one for each of {num_heads} heads"
        )
    return scale.expand(num_heads)
