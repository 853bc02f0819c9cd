"""Edits of logits: masks of allowed tokens, bias, stop tokens, bad words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.reference.logits import BadWords, Edits
from kernels.triton.launch import Launch

WORDS = 64  # mask words per program
TILE = 128  # edits per step


@triton.jit(do_not_specialize=["num_words"])
def bitmask_kernel(
    logits, masks, mask_of_row, stride, vocab_size, num_words, WORDS: tl.constexpr
):  # fmt: skip
    """One program per (row, block of mask words) sets the logits of the tokens that the row's mask
    forbids to -inf."""
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_row + row).to(tl.int64)
    if mask < 0:
        return
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    packed = tl.load(masks + mask * num_words + word, mask=word < num_words, other=-1)
    bit = tl.arange(0, 32)
    is_forbidden = ((packed[:, None] >> bit[None, :]) & 1) == 0
    ids = word[:, None] * 32 + bit[None, :]
    nothing = tl.full([WORDS, 32], float("-inf"), tl.float32)
    tl.store(logits + row * stride + ids, nothing, mask=is_forbidden & (ids < vocab_size))


@triton.jit
def edit_kernel(  # noqa: PLR0913
    logits, slots, positions, starts, ids, values, until, stride, TILE: tl.constexpr
):  # fmt: skip
    """One program per row adds the logit edits (token id, value) of the row's slot to its logits.
    Additions are atomic, since two edits may have the same token id."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    position = tl.load(positions + row)
    end = tl.load(starts + slot + 1)
    for start in range(tl.load(starts + slot), end, TILE):
        place = start + tl.arange(0, TILE)
        applies = position < tl.load(until + place, mask=place < end, other=-1)
        token = tl.load(ids + place, mask=applies, other=0)
        value = tl.load(values + place, mask=applies, other=0.0)
        tl.atomic_add(logits + row * stride + token, value, mask=applies)


@triton.jit(do_not_specialize=["stride_history"])
def words_kernel(  # noqa: PLR0913
    logits, slots, positions, starts, token_starts, token_ids, history, num_prompt,
    stride, stride_history, TILE: tl.constexpr,
):  # fmt: skip
    """One program per row. Sets the logit of a word's last token to -inf if the output ends with
    the word's other tokens."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions + row).to(tl.int32)
    first_output = tl.load(num_prompt + slot)
    for word in range(tl.load(starts + slot), tl.load(starts + slot + 1)):
        first = tl.load(token_starts + word)
        last = tl.load(token_starts + word + 1) - 1
        begin = position - (last - first)  # where the word would begin
        num_wrong = (begin < first_output).to(tl.int32)
        for start in range(first, last, TILE):
            place = start + tl.arange(0, TILE)
            mask = (place < last) & (begin >= first_output)
            wanted = tl.load(token_ids + place, mask=mask, other=0)
            there = history + slot * stride_history + begin + place - first
            found = tl.load(there, mask=mask, other=0)
            num_wrong += tl.sum((wanted != found).to(tl.int32))
        if num_wrong == 0:
            tl.store(logits + row * stride + tl.load(token_ids + last), float("-inf"))


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> None:
    """Forbid tokens by bit masks; see kernels.reference.logits.apply_bitmask."""
    if logits.numel():
        bitmask_launch(logits, masks, mask_of_row).run()


def bitmask_launch(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> Launch:
    num_rows, vocab_size = logits.shape
    num_words = masks.shape[1]
    args = {
        "logits": logits,
        "masks": masks,
        "mask_of_row": mask_of_row,
        "stride": logits.stride(0),
        "vocab_size": vocab_size,
        "num_words": num_words,
        "WORDS": WORDS,
    }
    return Launch(bitmask_kernel, (num_rows, triton.cdiv(num_words, WORDS)), args, 4, 1)


def apply_edits(
    logits: torch.Tensor, edits: Edits, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    """Add the edits of single tokens to logits; see kernels.reference.logits.apply_edits."""
    if len(logits):
        edit_launch(logits, edits, slots, positions).run()


def edit_launch(
    logits: torch.Tensor, edits: Edits, slots: torch.Tensor, positions: torch.Tensor
) -> Launch:
    args = {
        "logits": logits,
        "slots": slots,
        "positions": positions,
        **edits._asdict(),
        "stride": logits.stride(0),
        "TILE": TILE,
    }
    return Launch(edit_kernel, (len(logits),), args, 4, 1)


def forbid_words(
    logits: torch.Tensor,
    words: BadWords,
    slots: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    num_prompt: torch.Tensor,
) -> None:
    """Forbid the last tokens of bad words; see kernels.reference.logits.forbid_words."""
    if len(logits):
        words_launch(logits, words, (slots, positions), history, num_prompt).run()


def words_launch(
    logits: torch.Tensor,
    words: BadWords,
    rows: tuple[torch.Tensor, torch.Tensor],
    history: torch.Tensor,
    num_prompt: torch.Tensor,
) -> Launch:
    """Returns the launch of `words_kernel`. rows: (slots [R], positions [R])."""
    args = {
        "logits": logits,
        "slots": rows[0],
        "positions": rows[1],
        **words._asdict(),
        "history": history,
        "num_prompt": num_prompt,
        "stride": logits.stride(0),
        "stride_history": history.stride(0),
        "TILE": TILE // 4,
    }
    return Launch(words_kernel, (len(logits),), args, 1, 1)


def configurations() -> Iterator[Launch]:
    logits = torch.empty((64, 151936), device="meta")
    column = torch.empty(64, dtype=torch.int32, device="meta")
    table = torch.empty((64, 4748), dtype=torch.int32, device="meta")
    yield bitmask_launch(logits, table, column)
    for positions in (column, column.long()):
        yield edit_launch(logits, Edits(column, column, column.float(), column), column, positions)
        words = BadWords(column, column, column)
        yield words_launch(logits, words, (column, positions), table, column)
