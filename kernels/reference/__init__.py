"""Every operation in plain torch: the reference for tests, and the fallback without a kernel.

Float64 tensors are computed in float64, all others in float32.
"""

from kernels.reference.attention import (
    AttentionOptions,
    attend,
    gather,
    paged_attention,
)
from kernels.reference.causal_conv import causal_conv
from kernels.reference.delta_rule import gated_delta_rule
from kernels.reference.low_rank import add_low_rank
from kernels.reference.pointwise import (
    act_mul,
    activate,
    add_layer_norm,
    add_rms_norm,
    apply_gate,
    grouped_gated_norm,
    layer_norm,
    relu_squared,
    rms_norm,
)
from kernels.reference.rank_norms import scale_groups, sums_of_squares
from kernels.reference.rope import HeadNorm, Rope, qkv_rope_write
from kernels.reference.selective_scan import channel_scan, head_scan

__all__ = [
    "AttentionOptions",
    "HeadNorm",
    "Rope",
    "act_mul",
    "activate",
    "add_layer_norm",
    "add_low_rank",
    "add_rms_norm",
    "apply_gate",
    "attend",
    "causal_conv",
    "channel_scan",
    "gated_delta_rule",
    "gather",
    "grouped_gated_norm",
    "head_scan",
    "layer_norm",
    "paged_attention",
    "qkv_rope_write",
    "relu_squared",
    "rms_norm",
    "scale_groups",
    "sums_of_squares",
]
