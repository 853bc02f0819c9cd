"""Repetition, presence and frequency penalties; tokens are counted on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.reference.logits import Penalties, new_penalties
from kernels.triton.launch import Launch
from kernels.tuning import pad_power

BLOCK = 1024


@triton.jit(do_not_specialize=["num_words", "stride_drafts", "num_drafts"])
def penalise_kernel(  # noqa: PLR0913
    logits, slots, prompt_bits, counts, repetition, presence, frequency, drafts,
    stride, vocab_size, num_words, stride_drafts, num_drafts, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program penalises one block of a row's logits. drafts: tokens [R, num_drafts] or None."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    factor = tl.load(repetition + slot)
    inverse = 1.0 / factor
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    count = tl.load(counts + slot * vocab_size + ids, mask=is_token, other=0)
    if drafts is not None:
        for i in range(num_drafts):
            draft = tl.load(drafts + row * stride_drafts + i)
            count = tl.where(ids == draft, count + 1, count)
    packed = tl.load(prompt_bits + slot * num_words + (ids >> 5), mask=is_token, other=0)
    is_known = count + ((packed >> (ids & 31)) & 1) > 0  # False beyond the vocabulary
    here = logits + row * stride + ids
    x = tl.load(here, mask=is_known, other=0.0).to(tl.float64)
    x = x * tl.where(x > 0, inverse, factor)
    amount = tl.load(presence + slot) + tl.load(frequency + slot) * count.to(tl.float64)
    x = tl.where(count > 0, x - amount, x)
    tl.store(here, x.to(tl.float32), mask=is_known)


@triton.jit(do_not_specialize=["slot", "num_tokens", "num_prompt", "num_words"])
def seat_kernel(  # noqa: PLR0913
    token_ids, prompt_bits, counts, slot, num_tokens, num_prompt, vocab_size, num_words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK of tokens: marks prompt tokens in prompt_bits, counts output tokens."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + place, mask=place < num_tokens, other=0)
    slot = slot.to(tl.int64)
    is_prompt = place < num_prompt
    bits = tl.full([BLOCK], 1, tl.int32) << (ids & 31)
    tl.atomic_or(prompt_bits + slot * num_words + (ids >> 5), bits, mask=is_prompt)
    is_output = (place >= num_prompt) & (place < num_tokens)
    tl.atomic_add(counts + slot * vocab_size + ids, 1, mask=is_output)


@triton.jit(do_not_specialize=["width"])
def count_kernel(slots, token_ids, num_tokens, counts, vocab_size, width, PAD: tl.constexpr):
    """One program per row: adds the row's first num_tokens tokens to its slot's counts."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    place = tl.arange(0, PAD)
    mask = place < tl.load(num_tokens + row)
    ids = tl.load(token_ids + row * width + place, mask=mask, other=0)
    tl.atomic_add(counts + slot * vocab_size + ids, 1, mask=mask)


def seat(state: Penalties, slot: int, token_ids: torch.Tensor, num_prompt: int) -> None:
    """Set a slot's token counts for a request: num_prompt prompt tokens, then its output."""
    state.prompt_bits[slot].zero_()
    state.counts[slot].zero_()
    if len(token_ids):
        seat_launch(state, slot, token_ids, num_prompt).run()


def seat_launch(state: Penalties, slot: int, token_ids: torch.Tensor, num_prompt: int) -> Launch:
    args = {
        "token_ids": token_ids,
        "prompt_bits": state.prompt_bits,
        "counts": state.counts,
        "slot": slot,
        "num_tokens": len(token_ids),
        "num_prompt": num_prompt,
        "vocab_size": state.counts.shape[1],
        "num_words": state.prompt_bits.shape[1],
        "BLOCK": BLOCK,
    }
    return Launch(seat_kernel, (triton.cdiv(len(token_ids), BLOCK),), args, 4, 1)


def count_tokens(
    state: Penalties, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Count the first num_tokens[r] tokens of token_ids[r] as output of the request in slots[r]."""
    if token_ids.numel():
        count_launch(state, slots, token_ids, num_tokens).run()


def count_launch(
    state: Penalties, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> Launch:
    num_rows, width = token_ids.shape
    args = {
        "slots": slots,
        "token_ids": token_ids,
        "num_tokens": num_tokens,
        "counts": state.counts,
        "vocab_size": state.counts.shape[1],
        "width": width,
        "PAD": pad_power(width),
    }
    return Launch(count_kernel, (num_rows,), args, 1, 1)


def penalise_rows(
    logits: torch.Tensor, state: Penalties, slots: torch.Tensor, drafts: torch.Tensor | None = None
) -> None:
    """Apply repetition, presence and frequency penalties to the logits in place, by row's slot."""
    if logits.numel():
        penalise_launch(logits, state, slots, drafts).run()


def penalise_launch(
    logits: torch.Tensor, state: Penalties, slots: torch.Tensor, drafts: torch.Tensor | None
) -> Launch:
    num_rows, vocab_size = logits.shape
    args = {
        "logits": logits,
        "slots": slots,
        **state._asdict(),
        "drafts": drafts,
        "stride": logits.stride(0),
        "vocab_size": vocab_size,
        "num_words": state.prompt_bits.shape[1],
        "stride_drafts": 0 if drafts is None else drafts.stride(0),
        "num_drafts": 0 if drafts is None else drafts.shape[1],
        "BLOCK": BLOCK,
    }
    return Launch(penalise_kernel, (num_rows, triton.cdiv(vocab_size, BLOCK)), args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: with and without drafts, one token per row and several."""
    state = new_penalties(8, 151936, "meta")
    logits = torch.empty((64, 151936), device="meta")
    slots = torch.empty(64, dtype=torch.int32, device="meta")
    drafts = torch.empty((64, 4), dtype=torch.int32, device="meta")
    yield penalise_launch(logits, state, slots, None)
    yield penalise_launch(logits, state, slots, drafts)
    yield seat_launch(state, 0, slots, 32)
    yield count_launch(state, slots, drafts, slots)
