"""A paged cache whose blocks lie scattered, and where NaN is what no sequence owns."""

from collections.abc import Sequence

import torch

from kernels import AttentionMeta, reference
from kernels.reference.kv_rows import decode_rows, encode_rows

# What families ask of attention beside a scale; ``sinks`` stands for a column of them.
VARIANTS = {
    "full": {},
    "window": {"window": 7},
    "wide window": {"window": 40},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "all": {"window": 33, "softcap": 30.0, "sinks": True},
    "both ways": {"causal": False},
    "window both ways": {"causal": False, "window": 33},
}


class Cache:
    """One layer's cache that holds the context of some sequences, and the step's metadata.

    A step is (new tokens, context) of each sequence, single tokens first. Of a window's sequence
    the blocks that no query sees any more are given back: its table names block 0 there.
    """

    def __init__(
        self,
        step: Sequence[tuple[int, int]],
        shape: tuple[int, int],
        rng: torch.Generator,
        block: int = 16,
        window: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        heads, head_dim = shape
        lens = [new + context for new, context in step]
        blocks = [-(-length // block) for length in lens]
        free = (torch.randperm(sum(blocks), generator=rng) + 1).tolist()
        blank = encode_rows(torch.full((head_dim,), float("nan")), dtype)
        self.kv = blank.repeat(sum(blocks) + 2, 2, heads, block, 1)
        tables = torch.zeros((len(step), max(blocks) + 1), dtype=torch.int32)
        positions, slots = [], []
        for s, (_, context) in enumerate(step):
            tables[s, : blocks[s]] = torch.tensor([free.pop() for _ in range(blocks[s])])
            place = torch.arange(lens[s])
            where = tables[s].long()[place // block] * block + place % block
            for slot in where.tolist():
                written = torch.randn(2, heads, head_dim, generator=rng)
                self.kv[slot // block, :, :, slot % block] = encode_rows(written, dtype)
            if window:
                tables[s, : max(0, lens[s] - step[s][0] - window + 1) // block] = 0
            positions.append(place[context:])
            slots.append(where[context:])
        counts = [new for new, _ in step]
        self.meta = AttentionMeta(
            query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=tables,
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            block_size=block,
            num_decodes=next((i for i, n in enumerate(counts) if n != 1), len(counts)),
            max_query_len=max(counts),
            max_seq_len=max(lens),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.meta.positions)

    def decoded(self, dtype: torch.dtype, scales: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values as attention in ``dtype`` reads them, in float64."""
        numbers = decode_rows(self.kv).float()
        if scales is not None:
            numbers = numbers * scales[:, :, None, None]
        return numbers.to(dtype).double()


def assert_near(
    got: torch.Tensor,
    q: torch.Tensor,
    cache: Cache,
    variant: reference.AttentionOptions,
    *,
    weights_rounded: bool,
    read_as: torch.dtype | None = None,
) -> None:
    """Attention in bfloat16 against float64: outputs were rounded to eight bits, and so were the
    weights, if told so, each of which is multiplied by a value's magnitude."""
    assert got.dtype is torch.bfloat16 and not got.isnan().any()
    numbers = cache.decoded(read_as or q.dtype, variant.kv_scales)
    variant = variant._replace(kv_scales=None)
    wanted = reference.paged_attention(q.double(), numbers, cache.meta, variant)
    bound = wanted.abs() * 2**-8 + 2e-5
    if weights_rounded:
        magnitudes = numbers.clone()
        magnitudes[:, 1] = magnitudes[:, 1].abs()
        bound += reference.paged_attention(q.double(), magnitudes, cache.meta, variant) * 2**-8
    off = (got.double() - wanted).abs()
    assert (off <= bound).all(), f"{float((off - bound).max())} beyond its bound"
