"""The operations, and the choice of body by device (CPU: Numba or torch; CUDA: Triton).

Imports nothing of the engine. Must never define ``__version__``: transformers looks for a package
of this name and would take it for the one it knows.
"""

from kernels.meta import AttentionMeta
from kernels.ops import (
    act_mul,
    add_rms_norm,
    invariant_linear,
    linear,
    mixture,
    paged_attention,
    qkv_rope_write,
    rms_norm,
)

__all__ = [
    "AttentionMeta",
    "act_mul",
    "add_rms_norm",
    "invariant_linear",
    "linear",
    "mixture",
    "paged_attention",
    "qkv_rope_write",
    "rms_norm",
]
