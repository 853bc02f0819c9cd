"""Copies of recurrent states to and from blocks of the KV pool, in one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by number of bytes
TILE = 1024  # words that a program copies at a time
FIELDS = 6  # of a piece


@triton.jit(do_not_specialize=["num_blocks"])
def copy_kernel(
    pieces, rows, blocks, num_blocks, TO_BLOCKS: tl.constexpr, WORD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program copies one piece of one state. TO_BLOCKS: to the pool; otherwise from it."""
    piece = pieces + tl.program_id(0) * 6
    state = tl.load(piece) + tl.load(rows + tl.program_id(1)) * tl.load(piece + 1)
    own = tl.load(blocks + tl.program_id(1) * num_blocks + tl.load(piece + 5))
    block = tl.load(piece + 2) + own * tl.load(piece + 3)
    size = tl.load(piece + 4)
    if TO_BLOCKS:
        source, target = state, block
    else:
        source, target = block, state
    first = source.to(tl.pointer_type(WORD))
    second = target.to(tl.pointer_type(WORD))
    for number in range(tl.cdiv(size, TILE)):
        at = number * TILE + tl.arange(0, TILE)
        tl.store(second + at, tl.load(first + at, mask=at < size), mask=at < size)


def copy_pieces(
    pieces: torch.Tensor, word: int, rows: torch.Tensor, blocks: torch.Tensor, *, to_blocks: bool
) -> None:
    """Copy rows of states to blocks, or back.

    pieces: [pieces, 6] int64: address of the piece in the states, bytes between their rows, address
    in the pool, bytes between its blocks, length in words, and index of the block in a snapshot.
    word: bytes of a word; it divides all lengths and addresses. rows: [n] int64; blocks: [n, blocks
    of a snapshot] int64, contiguous."""
    if len(pieces) and len(rows):
        copy_launch(pieces, word, rows, blocks, to_blocks).run()


def copy_launch(
    pieces: torch.Tensor, word: int, rows: torch.Tensor, blocks: torch.Tensor, to_blocks: bool
) -> Launch:
    """The launch of `copy_kernel`."""
    args = {
        "pieces": pieces,
        "rows": rows,
        "blocks": blocks,
        "num_blocks": blocks.shape[1],
        "TO_BLOCKS": to_blocks,
        "WORD": WORDS[word],
        "TILE": TILE,
    }
    return Launch(copy_kernel, (len(pieces), len(rows)), args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: both directions, and words of each size."""
    pieces, blocks = (
        torch.empty(shape, dtype=torch.int64, device="meta") for shape in ((64, FIELDS), (2, 9))
    )
    for word in WORDS:
        for to_blocks in (True, False):
            yield copy_launch(pieces, word, blocks[:, 0].contiguous(), blocks, to_blocks)
