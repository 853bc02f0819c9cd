"""Attention over parts of the keys, put together: in float32, always in the order of the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch
from kernels.triton.tiles import LOG2E
from kernels.tuning import pad_power


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(  # noqa: PLR0913
    parts, part_lse, out, num_rows,
    P: tl.constexpr, PAD_P: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
):  # fmt: skip
    """Program row; parts [P, num_rows, D], part_lse [P, num_rows]. An empty part is not read."""
    row = tl.program_id(0)
    part = tl.arange(0, PAD_P)
    dims = tl.arange(0, PAD_D)
    where = part.to(tl.int64) * num_rows + row
    logs = tl.load(part_lse + where, mask=part < P, other=float("-inf"))
    peak = tl.max(logs, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2((logs - base) * LOG2E)
    total = tl.sum(weights, 0)
    safe = tl.where(total == 0, 1.0, total)
    mask = (logs > float("-inf"))[:, None] & (dims < D)[None, :]
    tile = tl.load(parts + where[:, None] * D + dims[None, :], mask=mask, other=0.0)
    merged = tl.sum(tile.to(tl.float32) * (weights / safe)[:, None], 0)
    there = out + row.to(tl.int64) * D + dims
    tl.store(there, merged.to(out.dtype.element_ty), mask=dims < D)


def merge_launch(parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor) -> Launch:
    num_parts, num_tokens, num_heads, head_dim = parts.shape
    args = {
        "parts": parts,
        "part_lse": part_lse,
        "out": out,
        "num_rows": num_tokens * num_heads,
        "P": num_parts,
        "PAD_P": pad_power(num_parts, 2),
        "D": head_dim,
        "PAD_D": pad_power(head_dim),
    }
    warps = 4 if num_parts * head_dim > 1024 else 1
    return Launch(merge_kernel, (num_tokens * num_heads,), args, warps, 1)
