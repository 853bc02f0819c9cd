"""Triton implementations for CUDA and ROCm devices, with the signatures of
:mod:`kernels.reference`."""

from kernels.reference.logits import are_sound
from kernels.triton.activation import act_mul, activate, apply_gate, relu_squared
from kernels.triton.attention import paged_attention, reads_fp8
from kernels.triton.bitmask import apply_bitmask, apply_edits, forbid_words
from kernels.triton.causal_conv import causal_conv
from kernels.triton.copies import copy_pieces
from kernels.triton.delta_rule import gated_delta_rule
from kernels.triton.gemv import matvec
from kernels.triton.index import advance, grow_block_tables, preparation, remember
from kernels.triton.invariant import invariant_linear
from kernels.triton.kv_write import qkv_rope_write
from kernels.triton.launch import is_interpreting
from kernels.triton.layer_norms import add_layer_norm, layer_norm
from kernels.triton.logprobs import token_logprobs
from kernels.triton.low_rank import add_low_rank
from kernels.triton.moe import mixture
from kernels.triton.norm import add_rms_norm, grouped_gated_norm, rms_norm
from kernels.triton.penalties import count_tokens, penalise_rows, seat
from kernels.triton.quant import quantize_rows, weight_only_product
from kernels.triton.sampling import choose_tokens, sample, sample_allowed
from kernels.triton.sampling_parts import best_of_parts, sample_part
from kernels.triton.selective_scan import channel_scan, head_scan

__all__ = [
    "act_mul",
    "activate",
    "add_layer_norm",
    "add_low_rank",
    "add_rms_norm",
    "advance",
    "apply_bitmask",
    "apply_edits",
    "apply_gate",
    "are_sound",
    "best_of_parts",
    "causal_conv",
    "channel_scan",
    "choose_tokens",
    "copy_pieces",
    "count_tokens",
    "forbid_words",
    "gated_delta_rule",
    "grouped_gated_norm",
    "grow_block_tables",
    "head_scan",
    "invariant_linear",
    "is_interpreting",
    "layer_norm",
    "matvec",
    "mixture",
    "paged_attention",
    "penalise_rows",
    "preparation",
    "qkv_rope_write",
    "quantize_rows",
    "reads_fp8",
    "relu_squared",
    "remember",
    "rms_norm",
    "sample",
    "sample_allowed",
    "sample_part",
    "seat",
    "token_logprobs",
    "weight_only_product",
]
