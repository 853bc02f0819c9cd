"""Drives a model over a paged KV cache by hand: scattered blocks, mixed steps, every logit."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from engine.kv.layout import one_group
from engine.layers.batch import ForwardBatch
from engine.models.model import Model
from engine.worker.memory import make_kv_cache, stored_as
from engine.worker.states import make_states
from kernels import AttentionMeta, StateMeta

MOST_SEQUENCES = 32


def junk(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 1e4).to(dtype)  # NaN in 8 bits


class PagedRun:
    """Some sequences of one model. Blocks are handed out in random order; unused ones hold junk."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        # What was never written must never be read, so it may as well poison what reads it.
        dtype = kv_dtype or model.dtype
        layers = stored_as(model.cache_spec, dtype)
        self.kv = make_kv_cache(
            layers, one_group(layers, block_size), num_blocks, block_size, dtype=dtype, zeros=junk
        )
        states = make_states(layers, 2 * MOST_SEQUENCES, junk)
        self.kv = [one or kv for one, kv in zip(states, self.kv, strict=True)]
        self.has_state = list(map(bool, states))
        self.copies: dict[str, int] = {}  # the row with the state of a sequence
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Run the next tokens of some sequences; sequence -> logits [len(tokens), V]."""
        order = sorted(chunks, key=lambda name: len(chunks[name]) > 1)  # decodes first, stable
        for name in order:
            self.grow(name, len(chunks[name]))
        batch = self.batch(order, chunks)
        hidden = self.model.forward(batch, self.kv).last
        logits = self.model.logits(hidden)
        parts = logits.split([len(chunks[name]) for name in order])
        return dict(zip(order, parts, strict=True))

    def prefill(self, name: str, tokens: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """All of a sequence in chunks of one size: logits [len(tokens), V]."""
        size = chunk or len(tokens)
        starts = range(0, len(tokens), size)
        return torch.cat([self.step({name: tokens[at : at + size]})[name] for at in starts])

    def grow(self, name: str, count: int) -> None:
        if name not in self.copies:
            self.copies[name] = 2 * len(self.copies)
        self.lengths[name] = self.lengths.get(name, 0) + count
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) * self.block_size < self.lengths[name]:
            blocks.append(self.free.pop())

    def batch(self, order: list[str], chunks: Mapping[str, Sequence[int]]) -> ForwardBatch:
        counts = [len(chunks[name]) for name in order]
        positions = [
            range(self.lengths[name] - count, self.lengths[name])
            for name, count in zip(order, counts, strict=True)
        ]
        slots = [
            self.blocks[name][p // self.block_size] * self.block_size + p % self.block_size
            for name, span in zip(order, positions, strict=True)
            for p in span
        ]
        width = max(len(self.blocks[name]) for name in order)
        flat = torch.tensor([p for span in positions for p in span])
        meta = AttentionMeta(
            query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[name] for name in order], dtype=torch.int32),
            block_tables=torch.tensor(
                [self.blocks[n] + [0] * (width - len(self.blocks[n])) for n in order],
                dtype=torch.int32,
            ),
            positions=flat,
            slots=torch.tensor(slots),
            block_size=self.block_size,
            num_decodes=sum(count == 1 for count in counts),
            max_query_len=max(counts),
            max_seq_len=max(self.lengths[name] for name in order),
        )
        ids = torch.tensor([token for name in order for token in chunks[name]])
        states = self.states(order, meta, [span[0] for span in positions])
        return ForwardBatch(ids, flat, tuple(states if one else meta for one in self.has_state))

    def states(self, order: list[str], meta: AttentionMeta, starts: list[int]) -> StateMeta:
        """The rows of states that the sequences read, and the others that they write."""
        reads = [
            self.copies[name] if start else -1 for name, start in zip(order, starts, strict=True)
        ]
        for name in order:
            self.copies[name] ^= 1
        return StateMeta(
            meta.query_start,
            torch.tensor(reads, dtype=torch.int32),
            torch.tensor([[self.copies[name]] for name in order], dtype=torch.int32),
            torch.tensor([len(order)], dtype=torch.int32),
            meta.num_decodes,
            meta.max_query_len,
        )
