"""Paged attention on the CPU. Tokens may be float32 or bfloat16; the cache also of 8 bits."""

from __future__ import annotations

from functools import cache

import torch

from kernels.cpu.attention.chunk import chunk_body, tokens_an_item
from kernels.cpu.attention.dotted_single import dotted_single_body, fits_dots
from kernels.cpu.attention.paired import HOW, chosen, paired_body
from kernels.cpu.attention.plan import CHUNKS, SINGLES, AttentionPlan, Heads
from kernels.cpu.attention.single import single_body
from kernels.cpu.attention.tiled_single import fits, tiled_single_body
from kernels.cpu.native import Kernel, bits, is_recorded
from kernels.cpu.threads import num_threads
from kernels.meta import AttentionMeta
from kernels.reference import AttentionOptions
from kernels.reference.kv_rows import scale_bytes

# With fewer pairs of query head and key, one thread is faster.
_ENOUGH = 512
_ALL = 1 << 30  # keys, more than any sequence has

PAIRED = chosen()
USUAL_BLOCK = 16  # block size for which kernels are prepared at start


def single_kernel(
    head_dim: int,
    group: int,
    sizes: tuple[int, int],
    block: int = USUAL_BLOCK,
    paired: str | None = PAIRED,
) -> Kernel:
    """The kernel for sequences of one query token. Its results equal those of ``chunk_kernel`` bit
    for bit. group: query heads per KV head; sizes: bytes of a query and of a cache element; block:
    tokens per KV block; paired: a key of ``paired.HOW``, or None for float32 arithmetic."""
    token, cell = sizes
    if paired is None or token != 2 or cell > 2:
        return widened_single_kernel(head_dim, group, sizes)
    if fits(head_dim, block, paired):
        return tiled_single_kernel(head_dim, group, paired, cell)
    if fits_dots(paired):
        return dotted_single_kernel(head_dim, group, paired, cell)
    return paired_single_kernel(head_dim, group, paired, cell)


@cache
def widened_single_kernel(head_dim: int, group: int, sizes: tuple[int, int]) -> Kernel:
    """A kernel for sequences of one query token, in float32 arithmetic. sizes: bytes of a query
    element and of a cache element."""
    return Kernel(single_body(head_dim, group, sizes), heavy=True)


@cache
def tiled_single_kernel(head_dim: int, group: int, how: str, cell: int = 2) -> Kernel:
    """A kernel for sequences of one query token in bfloat16, which multiplies all heads together.
    group: query heads per KV head; how: a key of ``paired.HOW`` that uses tiles; cell: bytes of a
    cache element."""
    return Kernel(tiled_single_body(head_dim, group, HOW[how], cell), heavy=True)


@cache
def dotted_single_kernel(head_dim: int, group: int, how: str, cell: int = 2) -> Kernel:
    """A kernel for sequences of one query token in bfloat16. group: query heads per KV head; how: a
    key of ``paired.HOW`` that uses dot products."""
    return Kernel(dotted_single_body(head_dim, group, HOW[how], cell), heavy=True)


@cache
def paired_single_kernel(head_dim: int, group: int, how: str, cell: int = 2) -> Kernel:
    """A kernel for sequences of one query token in bfloat16, for block and head sizes that
    `tiled_single_kernel` does not support. how: a key of ``paired.HOW`` that uses tiles."""
    return Kernel(paired_body(head_dim, group, HOW[how], cell, 1), heavy=True)


def chunk_kernel(
    head_dim: int, group: int, sizes: tuple[int, int], paired: str | None = PAIRED
) -> Kernel:
    """The kernel for sequences of several query tokens, with the parameters of `single_kernel`."""
    token, cell = sizes
    if paired is not None and token == 2 and cell <= 2:
        return paired_kernel(head_dim, group, paired, cell)
    return widened_kernel(head_dim, group, sizes)


@cache
def widened_kernel(head_dim: int, group: int, sizes: tuple[int, int]) -> Kernel:
    """A kernel for sequences of several query tokens, in float32 arithmetic."""
    return Kernel(chunk_body(head_dim, group, sizes), heavy=True)


@cache
def paired_kernel(head_dim: int, group: int, how: str, cell: int = 2) -> Kernel:
    """A kernel for sequences of several query tokens in bfloat16. how: a key of ``paired.HOW``."""
    return Kernel(paired_body(head_dim, group, HOW[how], cell), heavy=True)


def keys_ahead(variant: AttentionOptions) -> int:
    """The number of keys after its own position to which a query attends, at most."""
    if variant.causal:
        return 0
    return variant.window - 1 if variant.window else _ALL


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMeta,
    variant: AttentionOptions,
    paired: str | None = PAIRED,
) -> torch.Tensor:
    """Paged attention on the CPU; see kernels.ops.paged_attention. q: contiguous, float32 or
    bfloat16; sinks and factors of 8-bit floats: float32; paired: how to multiply bfloat16, a key of
    ``paired.HOW`` (for tests)."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, kv_heads, block, width = kv_layer.shape
    group, threads = num_heads // kv_heads, num_threads()
    sizes = q.element_size(), kv_layer.element_size()
    key = variant.window, keys_ahead(variant), Heads(num_heads, group, head_dim)
    plan = meta.scratch.get(key)
    if plan is None:
        plan = meta.scratch[key] = AttentionPlan(*key, tokens_an_item(group))
        plan.renew(meta)
        plan.find_singles()
    out = q.new_empty((num_tokens, num_heads * head_dim))
    if (
        num_tokens > plan.num_rows and not is_recorded()
    ):  # rows after a recorded step's last are not read
        out.zero_()
    tensors = (q.data_ptr(), kv_layer.data_ptr(), meta.block_tables.data_ptr(), out.data_ptr())
    shape = (kv_heads, meta.block_tables.stride(0), block)
    sinks = 0 if variant.sinks is None else variant.sinks.data_ptr()
    factors = 0 if variant.kv_scales is None else variant.kv_scales.data_ptr()
    row_bytes = width * kv_layer.element_size()
    numbers = (bits(variant.scale), bits(variant.softcap), sinks)
    ahead = keys_ahead(variant)
    rows: tuple[int, ...] = variant.window, factors, row_bytes, scale_bytes(kv_layer.dtype), ahead
    if variant.distances is not None:
        rows += (variant.distances.data_ptr(), variant.distances.shape[1])
    # A recorded launch is replayed with longer contexts.
    enough = 0 if is_recorded() else _ENOUGH
    if plan.num_singles:
        single_kernel(head_dim, group, sizes, block, paired).run(
            threads if plan.single_work * num_heads >= enough else 1,
            *tensors,
            *shape,
            plan.address(SINGLES),
            *numbers,
            *rows,
        )
    if plan.num_chunks:
        chunk_kernel(head_dim, group, sizes, paired).run(
            threads if plan.chunk_work * num_heads >= enough else 1,
            *tensors,
            *shape,
            plan.address(CHUNKS),
            *numbers,
            *rows,
        )
    return out
