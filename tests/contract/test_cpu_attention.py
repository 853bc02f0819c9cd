"""Attention of chunks in bfloat16: each body this processor can run, and soft ones of the others.

Cache slots that no sequence owns are NaN: reading one would show.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.paged_cache import VARIANTS, Cache

from kernels import AttentionMeta, reference
from kernels.cpu import isa
from kernels.cpu.attention import paged_attention, paired

NEEDS = {"dots": "avx512_bf16", "tiles": "amx"}
STEP = ((5, 0), (17, 13), (64, 40), (70, 1), (1, 9))
# Odd numbers of queries a key head, sizes that are no whole number of tiles, more than 48 rows.
SHAPES = [
    (80, 8),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((32, 1), (24, 4), (128, 2))),
    pytest.param((16, 50), marks=pytest.mark.slow),
]


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=list(paired.HOW))
def how(request: pytest.FixtureRequest) -> str:
    level = NEEDS.get(request.param, "base")
    if level not in isa.LEVELS[: isa.LEVELS.index(isa.LEVEL) + 1]:
        pytest.skip(f"{isa.processor()} computes without {level}")
    return request.param


def step(
    shape: tuple[int, int], rng: torch.Generator, **options: object
) -> tuple[torch.Tensor, Cache]:
    head_dim, group = shape
    cache = Cache(STEP, (2, head_dim), rng, dtype=torch.bfloat16, **options)
    cache.meta = replace(cache.meta, batch_invariant=True)
    return torch.randn(cache.num_tokens, 2 * group, head_dim, generator=rng).bfloat16(), cache


def attend(
    how: str, q: torch.Tensor, cache: Cache, meta: AttentionMeta | None = None, **chosen: object
) -> torch.Tensor:
    variant = reference.Variant(**chosen)
    return paged_attention(q.contiguous(), cache.kv, meta or cache.meta, variant, how)


def agrees(how: str, q: torch.Tensor, cache: Cache, **chosen: object) -> None:
    """Weights are rounded to eight bits, and outputs again."""
    got = attend(how, q, cache, **chosen)
    wanted = reference.paged_attention(
        q.double(), cache.kv.double(), cache.meta, reference.Variant(**chosen)
    )
    assert got.dtype is torch.bfloat16
    off = (got.double() - wanted).abs()
    assert float(off.max()) < 0.03 and float(off.mean()) < 0.002


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, how: str, rng: torch.Generator) -> None:
    chosen = {"scale": 0.17, **VARIANTS[name]}
    q, cache = step((64, 3), rng, window=chosen.get("window", 0))
    if chosen.get("sinks"):
        chosen["sinks"] = torch.randn(6, generator=rng)
    agrees(how, q, cache, **chosen)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple[int, int], how: str, rng: torch.Generator) -> None:
    agrees(how, *step(shape, rng), scale=shape[0] ** -0.5)


@pytest.mark.parametrize("block", [4, 24, 64])
def test_block_sizes(block: int, how: str, rng: torch.Generator) -> None:
    agrees(how, *step((32, 2), rng, block=block, window=50), scale=0.2, window=50)


@pytest.mark.parametrize("window", [0, 7, 40])
def test_a_token_is_the_same_however_its_prompt_was_cut(
    window: int, how: str, rng: torch.Generator
) -> None:
    q, cache = step((64, 3), rng)
    together = attend(how, q, cache, scale=0.1, window=window)
    starts, lens = cache.meta.query_start.tolist(), cache.meta.seq_lens.tolist()
    for s in range(len(lens)):
        num = starts[s + 1] - starts[s]
        cuts = sorted({0, num, *torch.randint(num + 1, (3,), generator=rng).tolist()})
        for first, end in pairwise(cuts):
            alone = AttentionMeta(
                query_start=torch.tensor([0, end - first], dtype=torch.int32),
                seq_lens=torch.tensor([lens[s] - num + end], dtype=torch.int32),
                block_tables=cache.meta.block_tables[s : s + 1],
                positions=cache.meta.positions[:0],
                slots=cache.meta.slots[:0],
                block_size=16,
                num_decodes=0,
                max_query_len=end - first,
                max_seq_len=lens[s],
                batch_invariant=True,
            )
            rows = slice(starts[s] + first, starts[s] + end)
            got = attend(how, q[rows], cache, alone, scale=0.1, window=window)
            assert torch.equal(got, together[rows])


def test_tiles_and_their_soft_form_are_alike(rng: torch.Generator) -> None:
    found = []
    q, cache = step((64, 3), rng)
    for name in ("soft tiles", "tiles"):
        if name == "tiles" and isa.LEVEL != "amx":
            pytest.skip(f"{isa.processor()} computes without amx")
        found.append(attend(name, q, cache, scale=0.1))
    assert torch.equal(*found)
