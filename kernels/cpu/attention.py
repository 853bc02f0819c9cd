"""Paged attention of float32 tokens."""

from __future__ import annotations

from functools import cache

import torch

from kernels.cpu.attention_body import attention_body
from kernels.cpu.attention_plan import Plan, make_plan
from kernels.cpu.native import Kernel, bits
from kernels.meta import AttentionMeta
from kernels.reference import Variant

# Pairs of query head and key worth a second thread.
_ENOUGH = 512


@cache
def _kernel(head_dim: int, group: int) -> Kernel:
    return Kernel(attention_body(head_dim, group), heavy=True)


def paged_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: Variant
) -> torch.Tensor:
    """See kernels.ops.paged_attention. q, kv_layer and sinks: contiguous float32."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, kv_heads, block, _ = kv_layer.shape
    threads = torch.get_num_threads()
    key = ("attention", variant.window)
    plan = meta.scratch.get(key)
    if plan is None:
        plan = meta.scratch[key] = make_plan(meta, variant.window, threads)
    out = q.new_empty((num_tokens, num_heads * head_dim))
    if num_tokens > plan.num_rows:
        out.zero_()
    _kernel(head_dim, num_heads // kv_heads).run(
        threads if plan.work * num_heads >= _ENOUGH else 1,
        q.data_ptr(),
        kv_layer.data_ptr(),
        meta.block_tables.data_ptr(),
        meta.seq_lens.data_ptr(),
        meta.query_start.data_ptr(),
        out.data_ptr(),
        kv_heads,
        meta.block_tables.stride(0),
        block,
        plan.items,
        plan.num_items,
        bits(variant.scale),
        variant.window,
        bits(variant.softcap),
        0 if variant.sinks is None else variant.sinks.data_ptr(),
        _partials(meta, plan, num_heads * (head_dim + 2)) if plan.is_cut else 0,
        plan.arrivals,
        plan.first_items,
    )
    return out


def _partials(meta: AttentionMeta, plan: Plan, size: int) -> int:
    """Address of room for the partial sums of cut sequences, shared by the step's layers."""
    room = meta.scratch.get("attention partials")
    if room is None or room.numel() < plan.num_items * size:
        room = meta.scratch["attention partials"] = torch.empty(plan.num_items * size)
    return room.data_ptr()
