"""Attention in bfloat16: each body this processor can run, and soft ones of the others.

Chunks come first, then single tokens. That both give a token the same bits is the subject of
`test_cpu_attention_bits.py`.

Cache slots that no sequence owns are NaN: reading one would show.
"""

from itertools import pairwise

import pytest
import torch
from support.paged_cache import VARIANTS, Cache, assert_near

from kernels import AttentionMeta, reference
from kernels.cpu import isa
from kernels.cpu.attention import paged_attention, paired, single_kernel, widened_single_kernel
from kernels.cpu.threads import num_threads, set_threads

NEEDS = {"dots": "avx512_bf16", "tiles": "amx"}
STEP = ((5, 0), (17, 13), (64, 40), (70, 1), (1, 9))
# Odd numbers of queries a key head, sizes that are no whole number of tiles, more than 48 rows.
SHAPES = [
    (48, 5),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in ((80, 8), (32, 1), (24, 4), (128, 2), (16, 50))
    ),
]


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def runs_here(how: str) -> bool:
    return NEEDS.get(how, "base") in isa.LEVELS[: isa.LEVELS.index(isa.LEVEL) + 1]


OWN = [how for how in (*paired.HOW, *NEEDS) if runs_here(how)][-1]
"""The way this processor takes. The others are left to the campaign: each is compiled anew."""


@pytest.fixture(
    params=[pytest.param(how, marks=[pytest.mark.slow] * (how != OWN)) for how in paired.HOW]
)
def how(request: pytest.FixtureRequest) -> str:
    return one_that_runs(request.param)


def one_that_runs(how: str) -> str:
    if not runs_here(how):
        pytest.skip(f"{isa.processor()} computes without {NEEDS[how]}")
    return how


def step(
    shape: tuple[int, int], rng: torch.Generator, **options: object
) -> tuple[torch.Tensor, Cache]:
    head_dim, group = shape
    cache = Cache(STEP, (2, head_dim), rng, dtype=torch.bfloat16, **options)
    return torch.randn(cache.num_tokens, 2 * group, head_dim, generator=rng).bfloat16(), cache


def attend(
    how: str, q: torch.Tensor, cache: Cache, meta: AttentionMeta | None = None, **chosen: object
) -> torch.Tensor:
    variant = reference.AttentionOptions(**chosen)
    return paged_attention(q.contiguous(), cache.kv, meta or cache.meta, variant, how)


def agrees(how: str, q: torch.Tensor, cache: Cache, **chosen: object) -> None:
    """Weights are rounded to eight bits, and outputs again."""
    got = attend(how, q, cache, **chosen)
    assert_near(got, q, cache, reference.AttentionOptions(**chosen), weights_rounded=True)


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


@pytest.mark.parametrize("block", [4, pytest.param(24, marks=pytest.mark.slow), 64])
def test_block_sizes(block: int, how: str, rng: torch.Generator) -> None:
    agrees(how, *step((64, 3), rng, block=block, window=50), scale=0.2, window=50)


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
            )
            rows = slice(starts[s] + first, starts[s] + end)
            got = attend(how, q[rows], cache, alone, scale=0.1, window=window)
            assert torch.equal(got, together[rows])


@pytest.mark.slow
def test_tiles_and_their_soft_form_are_alike(rng: torch.Generator) -> None:
    found = []
    q, cache = step((64, 3), rng)
    for name in ("soft tiles", "tiles"):
        if name == "tiles" and isa.LEVEL != "amx":
            pytest.skip(f"{isa.processor()} computes without amx")
        found.append(attend(name, q, cache, scale=0.1))
    assert torch.equal(*found)


# New tokens and context: one block and part of one, two items, and an odd number of keys.
SINGLES = ((1, 0), (1, 16), (1, 100), (1, 31), (1, 700))
# Key heads, query heads a key head, head size: tiles of scores that a key head shares with others,
# or has several of; sizes of fewer and more columns than are summed together.
SINGLE_SHAPES = [
    (2, 3, 64),
    (7, 5, 32),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in ((3, 1, 96), (2, 8, 128), (2, 2, 256), (1, 50, 64), (2, 20, 96))
    ),
]


def decode(
    shape: tuple[int, int, int], rng: torch.Generator, **options: object
) -> tuple[torch.Tensor, Cache]:
    kv_heads, group, head_dim = shape
    cache = Cache(SINGLES, (kv_heads, head_dim), rng, dtype=torch.bfloat16, **options)
    q = torch.randn(cache.num_tokens, kv_heads * group, head_dim, generator=rng)
    return q.bfloat16(), cache


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_single_tokens(name: str, how: str, rng: torch.Generator) -> None:
    chosen = {"scale": 0.17, **VARIANTS[name]}
    q, cache = decode((2, 3, 64), rng, window=chosen.get("window", 0))
    if chosen.get("sinks"):
        chosen["sinks"] = torch.randn(6, generator=rng)
    agrees(how, q, cache, **chosen)


@pytest.mark.parametrize("shape", SINGLE_SHAPES)
def test_shapes_of_single_tokens(
    shape: tuple[int, int, int], how: str, rng: torch.Generator
) -> None:
    agrees(how, *decode(shape, rng), scale=shape[2] ** -0.5)


@pytest.mark.parametrize(("block", "window"), [(1, 0), (4, 50), (24, 0), (64, 50), (512, 0)])
def test_block_sizes_of_single_tokens(
    block: int, window: int, how: str, rng: torch.Generator
) -> None:
    q, cache = decode((2, 3, 64), rng, block=block, window=window)
    agrees(how, q, cache, scale=0.2, window=window)


def test_single_tokens_take_tiles_where_keys_lie_so() -> None:
    tiled = single_kernel(64, 3, (2, 2), 16, "tiles")
    assert tiled is single_kernel(64, 3, (2, 2), 64, "tiles")
    assert tiled is not single_kernel(64, 3, (2, 2), 24, "tiles")
    assert tiled is not single_kernel(64, 3, (2, 2), 16, "dots")
    assert single_kernel(64, 3, (4, 2), 16, "tiles") is widened_single_kernel(64, 3, (4, 2))


def alone_of(cache: Cache, s: int) -> AttentionMeta:
    length = cache.meta.seq_lens[s : s + 1]
    return AttentionMeta(
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=length,
        block_tables=cache.meta.block_tables[s : s + 1],
        positions=length.long() - 1,
        slots=cache.meta.slots[:1],
        block_size=cache.meta.block_size,
        num_decodes=1,
        max_query_len=1,
        max_seq_len=int(length),
    )


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_single_token_is_the_same_in_any_company(
    window: int, threads: int, how: str, rng: torch.Generator
) -> None:
    q, cache = decode((2, 3, 64), rng)
    together = attend(how, q, cache, scale=0.1, window=window)
    before = num_threads()
    set_threads(threads)
    try:
        for s in range(len(SINGLES)):
            alone = attend(how, q[s : s + 1], cache, alone_of(cache, s), scale=0.1, window=window)
            assert torch.equal(alone[0], together[s])
    finally:
        set_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damage_of_a_single_token_stays_in_its_row(
    bad: float, how: str, rng: torch.Generator
) -> None:
    q, cache = decode((2, 3, 64), rng)
    q[2, 0, 3] = 1  # times the damaged key: an infinite score, not one of minus infinity
    sound = attend(how, q, cache, scale=0.1)
    q[1, 0, 3] = bad
    # Of a key and of a value: each in the first block of a sequence.
    cache.kv[cache.meta.block_tables[2, 0], 0, 0, 5, 3] = bad
    cache.kv[cache.meta.block_tables[3, 0], 1, 0, 5, 3] = bad
    got = attend(how, q, cache, scale=0.1)
    for s in (1, 2, 3):
        assert not got[s].isfinite().all()
    for s in (0, 4):
        assert torch.equal(got[s], sound[s])


def test_what_a_window_has_passed_is_not_read(how: str, rng: torch.Generator) -> None:
    q, cache = decode((2, 3, 64), rng)
    sound = attend(how, q, cache, scale=0.1, window=7)
    lens, tables = cache.meta.seq_lens.tolist(), cache.meta.block_tables.long()
    for s, length in enumerate(lens):
        passed = torch.arange(max(length - 7, 0))
        cache.kv[tables[s, passed // 16], :, :, passed % 16] = float("nan")
    assert torch.equal(attend(how, q, cache, scale=0.1, window=7), sound)


@pytest.mark.slow
def test_tiles_and_their_soft_form_are_alike_of_single_tokens(rng: torch.Generator) -> None:
    q, cache = decode((2, 3, 64), rng)
    names = ("soft tiles", one_that_runs("tiles"))
    assert torch.equal(*(attend(name, q, cache, scale=0.1) for name in names))
