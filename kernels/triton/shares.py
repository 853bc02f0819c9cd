"""Splits the keys of all sequences evenly between the programs of decode attention, counted in
tiles of keys. The plan is made once per step, on the device.

For example, sequences of 16, 16, 1563 and 16 tiles give each of 62 programs 1611 / 62 = 26 tiles.
The sequences get 1, 1, 61 and 1 work items: (sequence, first tile, end tile, slot).

The only item of a sequence has slot -1 and is written to the output. Several items are written to
consecutive slots of scratch memory, then merged. The host knows only upper bounds of items and
slots, so a recorded step fits any sequences. The idea is Stream-K's even split (Osama et al. 2023),
as in FlashInfer's planner."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.meta import AttentionMeta
from kernels.triton.launch import Launch
from kernels.tuning import Shares

SEQS = 128  # sequences per step of the plan


@triton.jit
def tiles_seen(
    seq, query_start, seq_lens, num_seqs, most_tokens, KEYS: tl.constexpr, WINDOW: tl.constexpr
):
    """Returns for each sequence: the first tile of keys that it attends to, the number of tiles
    that it attends to, and whether decode attention computes it (if not, the number is 0)."""
    there = seq < num_seqs
    num_tokens = tl.load(query_start + seq + 1, mask=there, other=0)
    num_tokens -= tl.load(query_start + seq, mask=there, other=0)
    length = tl.load(seq_lens + seq, mask=there, other=0)
    first = tl.zeros_like(length)
    if WINDOW > 0:
        first = tl.maximum(length - num_tokens - WINDOW + 1, 0) // KEYS
    num_tiles = tl.maximum((length + KEYS - 1) // KEYS - first, 0)
    is_ours = there & (num_tokens > 0) & (num_tokens <= most_tokens)
    return first, tl.where(is_ours, num_tiles, 0), is_ours


@triton.jit
def cut_of(tiles, is_ours, even):
    """Returns how the keys of each sequence are cut: (tiles per part, number of parts; 0 if decode
    attention does not compute the sequence). even: tiles that each program should get."""
    count = tl.maximum((tiles + even - 1) // even, 1)
    share = tl.maximum((tiles + count - 1) // count, 1)  # equal parts within a sequence
    count = tl.maximum((tiles + share - 1) // share, 1)
    return share, tl.where(is_ours, count, 0)


@triton.jit(do_not_specialize=["num_seqs", "num_items", "num_shares", "least_tiles", "most_tokens"])
def plan_kernel(  # noqa: PLR0913
    query_start, seq_lens, items, spans,
    num_seqs, num_items, num_shares, least_tiles, most_tokens,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Write the work items of all sequences. One program per SEQS sequences. items [num_items, 4]:
    sequence (-1: none), first tile, end tile, slot; spans [num_seqs, 2]: first slot and number of a
    sequence's parts (0: not split)."""
    total = 0
    for start in range(0, num_seqs, SEQS):
        seq = start + tl.arange(0, SEQS)
        _, tiles, _ = tiles_seen(seq, query_start, seq_lens, num_seqs, most_tokens, KEYS, WINDOW)
        total += tl.sum(tiles, 0)
    even = tl.maximum((total + num_shares - 1) // num_shares, least_tiles)

    own = tl.program_id(0) * SEQS
    num_before = 0
    slots_before = 0
    for start in range(0, own, SEQS):
        seq = start + tl.arange(0, SEQS)
        _, tiles, ours = tiles_seen(seq, query_start, seq_lens, num_seqs, most_tokens, KEYS, WINDOW)
        _, count = cut_of(tiles, ours, even)
        num_before += tl.sum(count, 0)
        slots_before += tl.sum(tl.where(count > 1, count, 0), 0)

    seq = own + tl.arange(0, SEQS)
    first, tiles, ours = tiles_seen(seq, query_start, seq_lens, num_seqs, most_tokens, KEYS, WINDOW)
    share, count = cut_of(tiles, ours, even)
    in_slots = tl.where(count > 1, count, 0)
    begin = num_before + tl.cumsum(count, 0) - count
    slot = slots_before + tl.cumsum(in_slots, 0) - in_slots
    tl.store(spans + seq * 2, slot, mask=seq < num_seqs)
    tl.store(spans + seq * 2 + 1, in_slots, mask=seq < num_seqs)
    for part in range(tl.max(count, 0)):
        place = items + (begin + part) * 4
        there = part < count
        begin_tile = first + part * share
        tl.store(place, seq, mask=there)
        tl.store(place + 1, begin_tile, mask=there)
        tl.store(place + 2, tl.minimum(begin_tile + share, first + tiles), mask=there)
        tl.store(place + 3, tl.where(count > 1, slot + part, -1), mask=there)
    if own + SEQS >= num_seqs:
        for start in range(num_before + tl.sum(count, 0), num_items, SEQS):
            item = start + tl.arange(0, SEQS)
            tl.store(items + item * 4, -1, mask=item < num_items)


class SharesPlan(NamedTuple):
    """The work items of decode attention in one step, shared by all layers with the same window."""

    items: torch.Tensor  # [n, 4] int32
    spans: torch.Tensor  # [sequences, 2] int32
    num_slots: int

    @classmethod
    def of(
        cls, meta: AttentionMeta, shares: Shares, sizes: tuple[int, int], keys: int, window: int
    ) -> tuple[SharesPlan, list[Launch]]:
        """Returns the step's plan, and the launches that compute it ([] if the plan is cached).
        sizes: (number of sequences, maximum query tokens of a sequence); keys: keys per tile."""
        scratch_key = ("shares", shares, sizes, keys, window)
        if scratch_key in meta.scratch:
            return meta.scratch[scratch_key], []
        num_seqs, most_tokens = sizes
        num_slots, num_items = shares.most_slots(num_seqs), shares.most_items(num_seqs)
        items = meta.seq_lens.new_empty(num_items, 4)
        plan = cls(items, meta.seq_lens.new_empty(num_seqs, 2), num_slots)
        meta.scratch[scratch_key] = plan
        args = {
            "query_start": meta.query_start,
            "seq_lens": meta.seq_lens,
            "items": items,
            "spans": plan.spans,
            "num_seqs": num_seqs,
            "num_items": num_items,
            "num_shares": shares.num,
            "least_tiles": max(1, shares.least_keys // keys),
            "most_tokens": most_tokens,
            "KEYS": keys,
            "WINDOW": window,
            "SEQS": SEQS,
        }
        return plan, [Launch(plan_kernel, (-(-num_seqs // SEQS),), args, 4, 1)]
