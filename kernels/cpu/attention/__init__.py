"""Paged attention of tokens over a cache, either float32 or bfloat16."""

from __future__ import annotations

from functools import cache

import torch

from kernels.cpu.attention.chunk import chunk_body, tokens_an_item
from kernels.cpu.attention.plan import Plan, make_plan
from kernels.cpu.attention.single import single_body
from kernels.cpu.native import Kernel, bits
from kernels.cpu.threads import num_threads
from kernels.meta import AttentionMeta
from kernels.reference import Variant

# Pairs of query head and key worth a second thread.
_ENOUGH = 512


@cache
def single_kernel(head_dim: int, group: int, sizes: tuple[int, int]) -> Kernel:
    """Of single tokens; sizes: bytes of an element of the queries, and of the cache."""
    return Kernel(single_body(head_dim, group, sizes), heavy=True)


@cache
def chunk_kernel(head_dim: int, group: int, sizes: tuple[int, int]) -> Kernel:
    """Of several tokens of a sequence."""
    return Kernel(chunk_body(head_dim, group, sizes), heavy=True)


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: Variant
) -> torch.Tensor:
    """See kernels.ops.paged_attention. q: contiguous, float32 or bfloat16; sinks: float32."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, kv_heads, block, _ = kv_layer.shape
    group, threads = num_heads // kv_heads, num_threads()
    sizes = q.element_size(), kv_layer.element_size()
    key = ("attention", variant.window, group)
    plan = meta.scratch.get(key)
    if plan is None:
        plan = make_plan(meta, variant.window, tokens_an_item(group))
        meta.scratch[key] = plan
    out = q.new_empty((num_tokens, num_heads * head_dim))
    if num_tokens > plan.num_rows:
        out.zero_()
    tensors = (q.data_ptr(), kv_layer.data_ptr(), meta.block_tables.data_ptr(), out.data_ptr())
    shape = (kv_heads, meta.block_tables.stride(0), block)
    sinks = 0 if variant.sinks is None else variant.sinks.data_ptr()
    numbers = (bits(variant.scale), bits(variant.softcap), sinks)
    if plan.singles.num:
        room = _partials(meta, plan, num_heads * (head_dim + 2)) if plan.is_cut else 0
        single_kernel(head_dim, group, sizes).run(
            threads if plan.singles.work * num_heads >= _ENOUGH else 1,
            *tensors,
            *shape,
            *plan.singles[:2],
            *numbers,
            room,
            plan.arrivals,
            plan.first_items,
        )
    if plan.chunks.num:
        chunk_kernel(head_dim, group, sizes).run(
            threads if plan.chunks.work * num_heads >= _ENOUGH else 1,
            *tensors,
            *shape,
            *plan.chunks[:2],
            *numbers,
            variant.window,
        )
    return out


def _partials(meta: AttentionMeta, plan: Plan, size: int) -> int:
    """Address of room for the partial sums of cut sequences, shared by the step's layers."""
    room = meta.scratch.get("attention partials")
    if room is None or room.numel() < plan.singles.num * size:
        room = meta.scratch["attention partials"] = torch.empty(
            plan.singles.num * size, dtype=torch.float32
        )
    return room.data_ptr()
