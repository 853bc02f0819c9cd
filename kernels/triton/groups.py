"""Sorts pairs (token and expert, or row and adapter) by group (expert or adapter) into blocks. Each
block has pairs of one group.

The sort is stable and uses no atomics, so two runs of a batch are bit-identical. Grid sizes are
upper bounds, since the host does not know the groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch
from kernels.tuning import pad_power

MOST_CHUNKS = 64  # maximum number of programs that count and place pairs
TABLE = 4096  # pairs times groups per step of a program
LABELLED = 16  # blocks per labelling program


class Groups(NamedTuple):
    """P pairs sorted by group into at most B blocks of M pairs. A block has pairs of one group, and
    padding if they do not fill it."""

    pairs: torch.Tensor  # [B * M] int32, indices of pairs; P: padding
    block_groups: torch.Tensor  # [B] int32, group of each block; -1: unused
    num_pairs: int

    @property
    def block(self) -> int:
        """M, the number of pairs per block."""
        return len(self.pairs) // max(len(self.block_groups), 1)


@triton.jit
def pairs_by_group(groups, start, num_pairs, TILE: tl.constexpr, PAD: tl.constexpr):
    """Load the groups of TILE pairs from index `start` on. Returns (indices of the pairs [TILE],
    whether each pair is in each group [TILE, PAD])."""
    pair = start + tl.arange(0, TILE)
    found = tl.load(groups + pair, mask=pair < num_pairs, other=-1)
    return pair, found[:, None] == tl.arange(0, PAD)[None, :]


@triton.jit(do_not_specialize=["num_pairs", "num_groups", "chunk"])
def count_kernel(
    groups, counts, num_pairs, num_groups, chunk, TILE: tl.constexpr, PAD: tl.constexpr
):
    """One program per chunk of pairs: counts[chunk, group] = number of its pairs in the group."""
    first, group = tl.program_id(0) * chunk, tl.arange(0, PAD)
    count = tl.zeros([PAD], tl.int32)
    for start in range(first, tl.minimum(first + chunk, num_pairs), TILE):
        _, is_of = pairs_by_group(groups, start, num_pairs, TILE, PAD)
        count += tl.sum(is_of.to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * num_groups + group, count, mask=group < num_groups)


@triton.jit
def counted(counts, before, num_chunks, num_groups, PAD: tl.constexpr):
    """Returns two counts of pairs per group [PAD]: in all chunks, and in the chunks before
    ``before``."""
    group = tl.arange(0, PAD)
    total, earlier = tl.zeros([PAD], tl.int32), tl.zeros([PAD], tl.int32)
    for start in range(0, num_chunks, 16):
        chunk = start + tl.arange(0, 16)
        mask = (chunk < num_chunks)[:, None] & (group < num_groups)[None, :]
        count = tl.load(counts + chunk[:, None] * num_groups + group[None, :], mask=mask, other=0)
        total += tl.sum(count, 0)
        earlier += tl.sum(tl.where((chunk < before)[:, None], count, 0), 0)
    return total, earlier


@triton.jit(do_not_specialize=["num_pairs", "num_groups", "chunk", "num_chunks", "num_blocks"])
def place_kernel(  # noqa: PLR0913
    groups, counts, pairs, block_groups, num_pairs, num_groups, chunk, num_chunks, num_blocks,
    M: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr, LABELLED: tl.constexpr,
):  # fmt: skip
    """Sort pairs by group: each of the first num_chunks programs places the pairs of one chunk. The
    others write the group of each block, and padding at the end of incomplete blocks."""
    program = tl.program_id(0)
    total, earlier = counted(counts, program, num_chunks, num_groups, PAD)
    blocks = (total + M - 1) // M
    end = tl.cumsum(blocks, 0)
    if program < num_chunks:
        place = (end - blocks) * M + earlier
        first = program * chunk
        for start in range(first, tl.minimum(first + chunk, num_pairs), TILE):
            pair, is_of = pairs_by_group(groups, start, num_pairs, TILE, PAD)
            number = tl.cumsum(is_of.to(tl.int32), 0) - 1 + place[None, :]
            there = tl.sum(tl.where(is_of, number, 0), 1)
            tl.store(pairs + there, pair, mask=tl.sum(is_of.to(tl.int32), 1) > 0)
            place += tl.sum(is_of.to(tl.int32), 0)
    else:
        block = (program - num_chunks) * LABELLED + tl.arange(0, LABELLED)
        number = block[:, None] - (end - blocks)[None, :]  # index of the block within each group
        is_of = (number >= 0) & (number < blocks[None, :])
        label = tl.sum(tl.where(is_of, tl.arange(0, PAD)[None, :] + 1, 0), 1) - 1
        tl.store(block_groups + block, label, mask=block < num_blocks)
        held = tl.sum(tl.where(is_of, total[None, :] - number * M, 0), 1)
        lane = tl.arange(0, M)[None, :]
        padding = pairs + block[:, None] * M + lane
        nobody = tl.zeros([LABELLED, M], tl.int32) + num_pairs
        tl.store(padding, nobody, mask=(block < num_blocks)[:, None] & (lane >= held[:, None]))


def align(chosen: torch.Tensor, num_groups: int, block: int) -> Groups:
    """Sort pairs of token and expert by expert. chosen: the expert of each pair, int32 of any
    shape, -1: skip the pair; block: pairs per block, to which each expert's pairs are padded."""
    groups, launches = align_launches(chosen.reshape(-1).contiguous(), num_groups, block)
    for launch in launches:
        launch.run()
    return groups


def align_launches(
    chosen: torch.Tensor, num_groups: int, block: int
) -> tuple[Groups, list[Launch]]:
    num_pairs = len(chosen)
    # Every group may end with a block of a single pair.
    num_blocks = (num_pairs + min(num_pairs, num_groups) * (block - 1)) // block
    groups = Groups(chosen.new_empty(num_blocks * block), chosen.new_empty(num_blocks), num_pairs)
    padded = pad_power(num_groups)
    tile = max(TABLE // padded, 1)
    chunk = triton.cdiv(triton.cdiv(num_pairs, MOST_CHUNKS), tile) * tile
    num_chunks = triton.cdiv(num_pairs, max(chunk, 1))
    count = {
        "groups": chosen,
        "counts": chosen.new_empty((num_chunks, num_groups)),
        "num_pairs": num_pairs,
        "num_groups": num_groups,
        "chunk": chunk,
        "TILE": tile,
        "PAD": padded,
    }
    place = {
        **count,
        "pairs": groups.pairs,
        "block_groups": groups.block_groups,
        "num_chunks": num_chunks,
        "num_blocks": num_blocks,
        "M": block,
        "LABELLED": LABELLED,
    }
    programs = num_chunks + triton.cdiv(num_blocks, LABELLED)
    launches = [
        Launch(count_kernel, (num_chunks,), count, 4, 1),
        Launch(place_kernel, (programs,), place, 4, 1),
    ]
    return groups, launches
