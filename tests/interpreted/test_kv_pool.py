"""Layers of several KV groups, of other sizes and windows, whose blocks lie in one pool: what each
body writes there and reads from it, against plain arithmetic on the pool.

NaN is in all of the pool that no token of a layer owns.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.kv.layout import KVLayout, LayerCache, PagedKV, SharedKV, make_layout
from engine.worker.memory import make_kv_cache
from kernels import AttentionMeta, cpu, reference
from kernels import triton as bodies

BLOCK = 16
WINDOW = 40
LAYERS = {
    "equal sizes": [
        PagedKV(num_kv_heads=2, head_dim=32, window=0 if layer % 3 == 2 else WINDOW)
        for layer in range(6)
    ],
    "other heads and sizes": [
        PagedKV(num_kv_heads=2, head_dim=32),
        PagedKV(num_kv_heads=1, head_dim=64, window=WINDOW),
        PagedKV(num_kv_heads=4, head_dim=32, window=WINDOW),
        PagedKV(num_kv_heads=2, head_dim=32),
        SharedKV(source=2),
    ],
}
STEPS = {
    "decode": ((1, 20), (1, 90), (1, 63)),
    "mixed": ((1, 20), (1, 90), (2, 0), (9, 61)),
}
RATIO = 3  # query heads a key head
BODIES = {"torch": reference, "triton": bodies, "cpu": cpu}
NO_ROPE, NO_NORM = reference.Rope(None, False), reference.HeadNorm(None, None, 1e-6, False)


class Pool:
    """A pool with the context of some sequences in every layer, and the step that comes next."""

    def __init__(
        self, layers: Sequence[LayerCache], step: Sequence[tuple[int, int]], rng: torch.Generator
    ) -> None:
        self.layers, self.step, self._rng = layers, step, rng
        self.layout: KVLayout = make_layout(
            layers, block_size=BLOCK, max_num_batched_tokens=64, max_model_len=4096
        )
        lens = [new + context for new, context in step]
        entries = [-(-length // BLOCK) for length in lens]
        num_groups, width = len(self.layout.groups), max(entries) + 1
        num_blocks = num_groups * sum(entries) + 2
        free = iter((torch.randperm(num_blocks - 1, generator=rng) + 1).tolist())
        self.blocks = [
            [[next(free) for _ in range(n)] for n in entries] for _ in self.layout.groups
        ]
        self.tensors: list[torch.Tensor] = []
        self.kv = make_kv_cache(
            layers, self.layout, num_blocks, BLOCK, dtype=torch.float32, zeros=self._filled
        )
        shape = (num_groups, len(step), width + (width * len(step) % 2 == 0))
        tables = torch.zeros(shape, dtype=torch.int32)  # later groups' are not aligned
        for group, sequences in enumerate(self.blocks):
            for s, blocks in enumerate(sequences):
                there = torch.tensor(blocks) * self.layout.scales[group]
                if window := self.layout.windows[group]:
                    there[: max(0, step[s][1] - window + 1) // BLOCK] = 0
                tables[group, s, : len(blocks)] = there
        new = [torch.arange(context, context + count) for count, context in step]

        def slots_in(table: torch.Tensor) -> torch.Tensor:
            rows = zip(table.long(), new, strict=True)
            return torch.cat([row[at // BLOCK] * BLOCK + at % BLOCK for row, at in rows])

        slots = list(map(slots_in, tables))
        counts, scratch = [count for count, _ in step], {}
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        num_decodes = next((i for i, n in enumerate(counts) if n != 1), len(counts))
        self.metas = [
            AttentionMeta(
                query_start=starts,
                seq_lens=torch.tensor(lens, dtype=torch.int32),
                block_tables=tables[group],
                positions=torch.cat(new),
                slots=slots[group],
                block_size=BLOCK,
                num_decodes=num_decodes,
                max_query_len=max(counts),
                max_seq_len=max(lens),
                scratch=scratch,
                group=group,
            )
            for group in range(num_groups)
        ]

    def _filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.tensors.append(torch.full(shape, float("nan"), dtype=dtype))
        return self.tensors[-1]

    def cell(self, layer: int, s: int, position: int) -> torch.Tensor:
        """Key and value [2, heads, head size] of a token, by the place of its block in the pool."""
        owner, (group, part) = self.layers[layer], self._place(layer)
        assert isinstance(owner, PagedKV)
        block, offset = self.blocks[group][s][position // BLOCK], position % BLOCK
        sizes = (2, owner.num_kv_heads, BLOCK, owner.head_dim)
        if self.layout.is_interleaved:
            whole = self.tensors[0].view(-1, self.layout.parts_of[group], *sizes)
            return whole[block, part, :, :, offset]
        return self.tensors[part].view(-1, *sizes)[block, :, :, offset]

    def _place(self, layer: int) -> tuple[int, int]:
        return self.layout.group_of[layer], self.layout.parts[layer]

    def owners(self) -> Iterator[tuple[int, PagedKV]]:
        """The layers that keep keys and values of their own."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PagedKV):
                yield index, layer

    def write_context(self) -> None:
        """Write keys and values of every token before the step, as far as a window reaches."""
        for layer, owner in self.owners():
            for s, (_, context) in enumerate(self.step):
                first = max(0, context - owner.window + 1) // BLOCK * BLOCK if owner.window else 0
                for position in range(first, context):
                    shape = (2, owner.num_kv_heads, owner.head_dim)
                    self.cell(layer, s, position)[:] = torch.randn(shape, generator=self._rng)

    def attended(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of the step's queries [N, heads, head size] in float64."""
        owner, out, row = self.layers[layer], [], 0
        assert isinstance(owner, PagedKV)
        for s, (count, context) in enumerate(self.step):
            for position in range(context, context + count):
                first = max(0, position - owner.window + 1) if owner.window else 0
                seen = [self.cell(layer, s, at) for at in range(first, position + 1)]
                k, v = torch.stack(seen).double().repeat_interleave(RATIO, dim=2).unbind(1)
                weights = (torch.einsum("hd,nhd->hn", q[row].double(), k) * 0.2).softmax(1)
                out.append(torch.einsum("hn,nhd->hd", weights, v).flatten())
                row += 1
        return torch.stack(out)


def recorded(metas: Sequence[AttentionMeta]) -> list[AttentionMeta]:
    """The step as a recorded one meets it: bounds instead of sizes, and sequences of no token."""
    scratch: dict = {}
    return [
        dataclasses.replace(
            meta,
            query_start=torch.cat((meta.query_start, meta.query_start[-1:].expand(2))),
            seq_lens=torch.cat((meta.seq_lens, meta.seq_lens.new_zeros(2))),
            block_tables=torch.cat((meta.block_tables, meta.block_tables[:2] * 0)),
            num_decodes=0,
            max_query_len=len(meta.slots),
            max_seq_len=4096,
            scratch=scratch,
            is_mixed=True,
        )
        for meta in metas
    ]


@pytest.mark.parametrize(
    ("body", "form"),
    [("torch", "exact"), ("cpu", "exact"), ("triton", "exact"), ("triton", "recorded")],
)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_of_all_groups_in_one_step(
    layers: str, step: str, body: str, form: str, seed: int
) -> None:
    """One after the other, as a model runs them, with scratch memory in common."""
    rng = torch.Generator().manual_seed(seed)
    pool = Pool(LAYERS[layers], STEPS[step], rng)
    assert pool.layout.is_interleaved == (layers != "equal sizes") and len(pool.layout.groups) >= 3
    pool.write_context()
    metas = pool.metas if form == "exact" else recorded(pool.metas)
    new = [
        (s, context + token)
        for s, (count, context) in enumerate(STEPS[step])
        for token in range(count)
    ]
    for layer, owner in pool.owners():
        meta, before = metas[pool.layout.group_of[layer]], [one.clone() for one in pool.tensors]
        heads, kv_heads, dim = RATIO * owner.num_kv_heads, owner.num_kv_heads, owner.head_dim
        qkv = torch.randn(len(new), (heads + 2 * kv_heads) * dim, generator=rng)
        sizes = (heads, kv_heads, dim)
        q = BODIES[body].qkv_rope_write(qkv, pool.kv[layer], meta, sizes, NO_ROPE, NO_NORM)
        after = [one.clone() for one in pool.tensors]
        for one, kept in zip(pool.tensors, before, strict=True):
            one.copy_(kept)
        for row, (s, position) in enumerate(new):
            written = qkv[row, heads * dim :].view(2, kv_heads, dim)
            pool.cell(layer, s, position)[:] = written
        for one, wrote in zip(pool.tensors, after, strict=True):
            torch.testing.assert_close(wrote, one, rtol=0, atol=0, equal_nan=True)
        options = reference.AttentionOptions(0.2, owner.window)
        got = BODIES[body].paged_attention(q, pool.kv[layer], meta, options)
        torch.testing.assert_close(got.double(), pool.attended(layer, q), rtol=2e-5, atol=2e-5)
