"""The operations of a model step. Each has one implementation per device: Triton on GPUs, Numba or
torch on CPUs.

Does not import the engine. Must not define ``__version__``, or transformers would mistake it for
the package "kernels" of Hugging Face."""

from kernels.meta import AttentionMeta, StateMeta
from kernels.ops import (
    act_mul,
    activate,
    add_in_place,
    add_layer_norm,
    add_low_rank,
    add_rms_norm,
    apply_gate,
    causal_conv,
    channel_scan,
    clear_others,
    gated_delta_rule,
    grouped_gated_norm,
    head_scan,
    invariant_linear,
    join_columns,
    layer_norm,
    linear,
    mixture,
    own_rows,
    paged_attention,
    qkv_rope_write,
    relu_squared,
    rms_norm,
    scale_in_place,
)

__all__ = [
    "AttentionMeta",
    "StateMeta",
    "act_mul",
    "activate",
    "add_in_place",
    "add_layer_norm",
    "add_low_rank",
    "add_rms_norm",
    "apply_gate",
    "causal_conv",
    "channel_scan",
    "clear_others",
    "gated_delta_rule",
    "grouped_gated_norm",
    "head_scan",
    "invariant_linear",
    "join_columns",
    "layer_norm",
    "linear",
    "mixture",
    "own_rows",
    "paged_attention",
    "qkv_rope_write",
    "relu_squared",
    "rms_norm",
    "scale_in_place",
]
