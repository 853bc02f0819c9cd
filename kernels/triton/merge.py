"""Merges the results of attention over parts of the keys, in float32 and in the order of the parts.

For `merge_kernel` all rows have the same number of parts; `spans_kernel` reads each sequence's
number of parts from a plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch
from kernels.triton.tiles import LOG2E
from kernels.tuning import Splits, pad_power


class Parts(NamedTuple):
    """Where the prefill kernel writes: to the output or, if keys are split, to partial results.
    ``merges``: launches that combine these."""

    out: torch.Tensor  # [n, Hq, D], or [splits, n, Hq, D] float32
    lse: torch.Tensor | None  # [splits, n, Hq], logarithms of softmax sums
    splits: Splits
    first_row: int  # row of the batch that is row 0 of out
    merges: list[Launch]

    @classmethod
    def of(cls, out: torch.Tensor, splits: Splits, *, first_row: int = 0) -> Parts:
        """Returns where the kernel writes the results for `out`: directly or, if keys are split, to
        new buffers with lse = -inf. first_row: the row of the batch that is row 0 of `out`."""
        if splits.num == 1:
            return cls(out, None, splits, first_row, [])
        parts = out.new_empty((splits.num, *out.shape), dtype=torch.float32)
        lse = parts.new_full(parts.shape[:-1], float("-inf"))
        return cls(parts, lse, splits, first_row, [merge_launch(parts, lse, out)])

    def args(self, keys_a_tile: int) -> dict[str, object]:
        """Arguments of `prefill_kernel` for these outputs. keys_a_tile: keys per tile."""
        return {
            "out": self.out,
            "lse": self.lse,
            "out_row0": self.first_row,
            "num_rows": self.out.shape[-3],
            "num_splits": self.splits.num,
            "min_tiles": -(-self.splits.least_keys // keys_a_tile),
        }


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def merge_kernel(  # noqa: PLR0913
    parts, part_lse, out, num_rows, num_parts,
    PAD_P: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
):  # fmt: skip
    """One program per row merges its parts. parts [num_parts, num_rows, D], part_lse [num_parts,
    num_rows]. Parts with lse -inf are not read; a row that has only such parts is not written."""
    row = tl.program_id(0)
    part = tl.arange(0, PAD_P)
    dims = tl.arange(0, PAD_D)
    where = part.to(tl.int64) * num_rows + row
    logs = tl.load(part_lse + where, mask=part < num_parts, other=float("-inf"))
    if tl.sum((logs != float("-inf")).to(tl.int32), 0) == 0:
        return  # a row of the other kernel, or of no sequence
    peak = tl.max(logs, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)  # for a row of NaN
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
        "num_parts": num_parts,
        # Only two sizes, since each is compiled separately.
        "PAD_P": 8 if num_parts <= 8 else pad_power(num_parts, 32),
        "D": head_dim,
        "PAD_D": pad_power(head_dim),
    }
    warps = 4 if num_parts > 8 or head_dim > 128 else 1
    return Launch(merge_kernel, (num_tokens * num_heads,), args, warps, 1)


SPAN_PARTS, SPAN_HEADS = 8, 1  # parts and heads per step of a program; the fastest on an H100


@triton.jit(do_not_specialize=["most_tokens"])
def spans_kernel(  # noqa: PLR0913
    parts, part_lse, spans, query_start, out, most_tokens,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of each sequence. One program per (sequence x token, block of
    heads). parts [slots, most_tokens, NUM_HEADS, D]; part_lse: as parts, without D; spans
    [sequences, 2]: first slot and number of parts (0: the sequence is skipped)."""
    seq = tl.program_id(0) // most_tokens
    token = tl.program_id(0) % most_tokens
    num_parts = tl.load(spans + seq * 2 + 1)
    row0 = tl.load(query_start + seq)
    if (num_parts == 0) | (token >= tl.load(query_start + seq + 1) - row0):
        return
    first = tl.load(spans + seq * 2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PAD_D)
    is_head = head < NUM_HEADS
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        where = ((first + part) * most_tokens + token)[:, None] * NUM_HEADS + head[None, :]
        there = (part < num_parts)[:, None] & is_head[None, :]
        logs = tl.load(part_lse + where, mask=there, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(logs, 0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.full([HEADS], 0.0, tl.float32)
    merged = tl.full([HEADS, PAD_D], 0.0, tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        where = ((first + part) * most_tokens + token)[:, None] * NUM_HEADS + head[None, :]
        there = (part < num_parts)[:, None] & is_head[None, :]
        logs = tl.load(part_lse + where, mask=there, other=float("-inf"))
        weights = tl.exp2((logs - base[None, :]) * LOG2E)
        total += tl.sum(weights, 0)
        mask = (logs > float("-inf"))[:, :, None] & (dims < D)[None, None, :]
        rows = where.to(tl.int64) * D
        tile = tl.load(parts + rows[:, :, None] + dims[None, None, :], mask=mask, other=0.0)
        merged += tl.sum(tile * weights[:, :, None], 0)
    safe = tl.where(total == 0, 1.0, total)
    there = out + ((row0 + token).to(tl.int64) * NUM_HEADS + head)[:, None] * D + dims[None, :]
    mask = is_head[:, None] & (dims < D)[None, :]
    tl.store(there, (merged / safe[:, None]).to(out.dtype.element_ty), mask=mask)


def spans_launch(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    spans: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    _, most_tokens, num_heads, head_dim = parts.shape
    args = {
        "parts": parts,
        "part_lse": part_lse,
        "spans": spans,
        "query_start": query_start,
        "out": out,
        "most_tokens": most_tokens,
        "NUM_HEADS": num_heads,
        "D": head_dim,
        "PAD_D": pad_power(head_dim),
        "PARTS": SPAN_PARTS if head_dim <= 128 else SPAN_PARTS // 2,
        "HEADS": SPAN_HEADS,
    }
    grid = (len(spans) * most_tokens, -(-num_heads // SPAN_HEADS))
    return Launch(spans_kernel, grid, args, 4, 1)
