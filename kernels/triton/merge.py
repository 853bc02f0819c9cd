"""Attention over parts of the keys, put together: in float32, always in the order of the parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch
from kernels.triton.tiles import LOG2E
from kernels.tuning import Splits, pad_power


class Parts(NamedTuple):
    """Where attention is written, whole or in parts of the keys that are merged afterwards."""

    out: torch.Tensor  # [n, Hq, D], or [splits, n, Hq, D] float32
    lse: torch.Tensor | None  # [splits, n, Hq], logarithms of the sums of the softmax
    splits: Splits
    first_row: int  # of the batch: row 0 of out
    merges: list[Launch]

    @classmethod
    def of(cls, out: torch.Tensor, splits: Splits, *, first_row: int = 0, owns_all: bool) -> Parts:
        """For these rows of the output. owns_all: each is written, or says that it is empty."""
        if splits.num == 1:
            return cls(out, None, splits, first_row, [])
        parts = out.new_empty((splits.num, *out.shape), dtype=torch.float32)
        lse = parts.new_empty(parts.shape[:-1])
        if not owns_all:
            lse.fill_(float("-inf"))
        return cls(parts, lse, splits, first_row, [merge_launch(parts, lse, out)])

    def args(self, keys_a_tile: int) -> dict[str, object]:
        """What decode and prefill kernels take of it."""
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
    """Program row; parts [num_parts, num_rows, D], part_lse [num_parts, num_rows]. An empty part
    is not read."""
    row = tl.program_id(0)
    part = tl.arange(0, PAD_P)
    dims = tl.arange(0, PAD_D)
    where = part.to(tl.int64) * num_rows + row
    logs = tl.load(part_lse + where, mask=part < num_parts, other=float("-inf"))
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
        "num_parts": num_parts,
        # Of two sizes only: each is compiled for itself.
        "PAD_P": 8 if num_parts <= 8 else pad_power(num_parts, 32),
        "D": head_dim,
        "PAD_D": pad_power(head_dim),
    }
    warps = 4 if num_parts > 8 or head_dim > 128 else 1
    return Launch(merge_kernel, (num_tokens * num_heads,), args, warps, 1)
