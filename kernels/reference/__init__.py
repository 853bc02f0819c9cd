"""Every operation in plain torch: what each body is tested against, and what runs where none is.

Float64 tensors are computed in float64, everything else in float32.
"""

from kernels.reference.attention import (
    Variant,
    attend,
    gather,
    paged_attention,
)
from kernels.reference.pointwise import act_mul, add_rms_norm, rms_norm
from kernels.reference.rope import HeadNorm, Rope, qkv_rope_write

__all__ = [
    "HeadNorm",
    "Rope",
    "Variant",
    "act_mul",
    "add_rms_norm",
    "attend",
    "gather",
    "paged_attention",
    "qkv_rope_write",
    "rms_norm",
]
