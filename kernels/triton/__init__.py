"""Bodies for CUDA and ROCm devices. Same signatures as :mod:`kernels.reference`."""

from kernels.triton.attention import paged_attention, paged_attention_lse
from kernels.triton.kv_write import qkv_rope_write
from kernels.triton.merge import merge_states

__all__ = [
    "merge_states",
    "paged_attention",
    "paged_attention_lse",
    "qkv_rope_write",
]
