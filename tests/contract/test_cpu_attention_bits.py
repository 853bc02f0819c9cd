"""A token's attention on a CPU, to the last bit: alone, in chunks of any size, among others, on one
thread or on several. Each body this processor can run, and soft ones of the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from support.paged_cache import Cache

from kernels import AttentionMeta, reference
from kernels.cpu import isa
from kernels.cpu.attention import paged_attention, paired
from kernels.cpu.threads import num_threads, set_threads

# New tokens and context: within a stretch of keys, over its end, over several.
STEP = ((1, 9), (5, 0), (17, 250), (70, 1), (40, 500), (3, 1100))
NEEDS = {"dots": "avx512_bf16", "tiles": "amx"}


class Case(NamedTuple):
    """Types of queries and cache, and how bfloat16 is multiplied: of ``paired.HOW`` or widened."""

    queries: torch.dtype
    cache: torch.dtype
    how: str | None = None

    @property
    def runs_here(self) -> bool:
        level = NEEDS.get(self.how or "", "base")
        return isa.LEVELS.index(level) <= isa.LEVELS.index(isa.LEVEL)


CASES = {
    "float32": Case(torch.float32, torch.float32),
    "half a cache": Case(torch.float32, torch.bfloat16),
    "widened": Case(torch.bfloat16, torch.bfloat16),
    **{how: Case(torch.bfloat16, torch.bfloat16, how) for how in paired.HOW},
}
VARIANTS = {
    "full": {},
    "window": {"window": 70},
    "all": {"window": 300, "softcap": 20.0, "sinks": True},
}
# Key heads, query heads a key head, head size, keys of a block.
SHAPES = [
    (2, 3, 64, 16),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in (
            (2, 3, 64, 24),
            (3, 5, 24, 4),
            (1, 17, 32, 16),
            (2, 1, 80, 48),
            (1, 50, 128, 64),
        )
    ),
]


AT_EACH_LEVEL = ("float32", "widened", "dots")
OWN = [name for name in ("widened", *NEEDS) if CASES[name].runs_here][-1]
"""The way this processor multiplies bfloat16, which is compiled for other tests as well."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Compiling attention takes some ten seconds for each way to multiply."""
    is_short = name in ("float32", OWN)
    return [pytest.mark.isa] * (name in AT_EACH_LEVEL) + [pytest.mark.slow] * (not is_short)


@pytest.fixture(params=[pytest.param(name, marks=marks_of(name)) for name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    found = CASES[request.param]
    if not found.runs_here:
        pytest.skip(f"{isa.processor()} computes without {NEEDS[found.how or '']}")
    return found


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = num_threads()
    set_threads(request.param)
    yield request.param
    set_threads(before)


def attend(
    case: Case,
    q: torch.Tensor,
    cache: Cache,
    rows: Sequence[tuple[int, int, int]],
    variant: reference.AttentionOptions,
) -> torch.Tensor:
    """Outputs of tokens [first, end) of some sequences, in one step."""
    starts, lens = cache.meta.query_start.tolist(), cache.meta.seq_lens.tolist()
    counts = [end - first for _, first, end in rows]
    meta = AttentionMeta(
        query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(
            [lens[s] - (starts[s + 1] - starts[s]) + end for s, _, end in rows], dtype=torch.int32
        ),
        block_tables=cache.meta.block_tables[[s for s, _, _ in rows]].contiguous(),
        positions=cache.meta.positions[:0],
        slots=cache.meta.slots[:0],
        block_size=cache.meta.block_size,
        num_decodes=0,
        max_query_len=max(counts),
        max_seq_len=max(lens),
    )
    given = torch.cat([q[starts[s] + first : starts[s] + end] for s, first, end in rows])
    return paged_attention(given, cache.kv, meta, variant, case.how)


def steps(rng: random.Random) -> Iterator[list[tuple[int, int, int]]]:
    """All tokens of ``STEP`` by themselves, and in pieces of which some stand together."""
    pieces = [(s, t, t + 1) for s, (new, _) in enumerate(STEP) for t in range(new)]
    yield pieces
    pieces = []
    for s, (new, _) in enumerate(STEP):
        cuts = sorted({0, new, *(rng.randrange(new + 1) for _ in range(4))})
        pieces += [(s, *cut) for cut in pairwise(cuts)]
    rng.shuffle(pieces)
    while pieces:
        num = rng.randint(1, 6)
        yield pieces[:num]
        del pieces[:num]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_any_company(
    case: Case, shape: tuple[int, int, int, int], name: str, threads: int, seed: int
) -> None:
    kv_heads, group, head_dim, block = shape
    rng = torch.Generator().manual_seed(seed)
    cache = Cache(STEP, (kv_heads, head_dim), rng, block=block, dtype=case.cache)
    q = 2 * torch.randn(cache.num_tokens, kv_heads * group, head_dim, generator=rng)
    q = q.to(case.queries)
    chosen = {"scale": head_dim**-0.5, **VARIANTS[name]}
    if chosen.get("sinks"):
        chosen["sinks"] = torch.randn(kv_heads * group, generator=rng)
    variant = reference.AttentionOptions(**chosen)
    together = paged_attention(q, cache.kv, cache.meta, variant, case.how)
    starts = cache.meta.query_start.tolist()
    for rows in steps(random.Random(seed)):
        found = attend(case, q, cache, rows, variant)
        wanted = torch.cat(
            [together[starts[s] + first : starts[s] + end] for s, first, end in rows]
        )
        assert torch.equal(found, wanted), (seed, rows)
