"""Log-probabilities and ranks of single tokens, without storing normalised rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.cut import LOG2E, load_part
from kernels.triton.launch import Launch
from kernels.tuning import pad_power

BLOCK = 4096


@triton.jit(do_not_specialize=["num_blocks", "num_ids"])
def sum_kernel(  # noqa: PLR0913
    logits, token_ids, peaks, sums, above, stride, vocab_size, num_blocks, num_ids,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (row, block of the vocabulary). Writes the block's largest logit, its sum of
    exp(logit - largest), and how many of its logits exceed that of the row's first token id."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    chosen = tl.load(logits + row * stride + tl.load(token_ids + row * num_ids)).to(tl.float32)
    x = load_part(logits + row * stride, block * BLOCK, vocab_size, BLOCK)
    peak = tl.max(x)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    here = row * num_blocks + block
    tl.store(peaks + here, peak)
    tl.store(sums + here, tl.sum(tl.exp2((x - base) * LOG2E)))
    tl.store(above + here, tl.sum((x > chosen).to(tl.int32)))


@triton.jit(do_not_specialize=["num_blocks", "num_ids"])
def gather_kernel(  # noqa: PLR0913
    logits, token_ids, peaks, sums, above, logprobs, ranks, stride, num_blocks, num_ids,
    PAD_BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per row. Combines the results of `sum_kernel` to log-probabilities and rank."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAD_BLOCKS)
    here = row * num_blocks + place
    is_block = place < num_blocks
    peak = tl.load(peaks + here, mask=is_block, other=float("-inf"))
    highest = tl.max(peak)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    part = tl.load(sums + here, mask=is_block, other=0.0)
    total = tl.sum(part * tl.exp2((peak - base) * LOG2E))
    log_sum = base + tl.log(total)
    tl.store(ranks + row, tl.sum(tl.load(above + here, mask=is_block, other=0)) + 1)
    for start in range(0, num_ids, TILE):
        column = start + tl.arange(0, TILE)
        mask = column < num_ids
        ids = tl.load(token_ids + row * num_ids + column, mask=mask, other=0)
        x = tl.load(logits + row * stride + ids, mask=mask, other=0.0).to(tl.float32)
        tl.store(logprobs + row * num_ids + column, x - log_sum, mask=mask)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities [R, M], and the rank [R] of each row's first token id."""
    logprobs = torch.empty(token_ids.shape, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        for launch in launches(logits, token_ids.contiguous(), logprobs, ranks):
            launch.run()
    return logprobs, ranks


def launches(
    logits: torch.Tensor, token_ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor
) -> list[Launch]:
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    sums = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    common = {
        "logits": logits,
        "token_ids": token_ids,
        "peaks": torch.empty_like(sums),
        "sums": sums,
        "above": torch.empty_like(sums, dtype=torch.int32),
        "stride": logits.stride(0),
        "num_blocks": num_blocks,
        "num_ids": token_ids.shape[1],
    }
    by_block = {**common, "vocab_size": vocab_size, "BLOCK": BLOCK}
    by_row = {
        **common,
        "logprobs": logprobs,
        "ranks": ranks,
        "PAD_BLOCKS": pad_power(num_blocks),
        "TILE": 32,
    }
    return [
        Launch(sum_kernel, (num_rows, num_blocks), by_block, 8, 1),
        Launch(gather_kernel, (num_rows,), by_row, 1, 1),
    ]


def configurations() -> Iterator[Launch]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.empty((64, 151936), dtype=dtype, device="meta")
        ids = torch.empty((64, 6), dtype=torch.int64, device="meta")
        yield from launches(logits, ids, ids.float(), ids[0].int())
