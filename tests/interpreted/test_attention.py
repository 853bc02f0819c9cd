"""Attention: each body against the reference in float64, over pairs of all switches.

Where nothing may be read lies NaN: free blocks, blocks a window left, the rest of a last block.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from support.paged_cache import Cache
from support.pairwise import pairwise

from kernels import AttentionMeta, cpu, reference, tuning
from kernels import triton as bodies
from kernels.triton.attention import launches

STEPS = {
    "decode": ((1, 0), (1, 16), (1, 300), (1, 31)),
    "drafts": ((4, 20), (2, 140), (1, 63), (3, 0)),
    "prefill": ((37, 0), (1, 0), (5, 0)),
    "mixed": ((1, 20), (1, 150), (5, 0), (17, 13), (40, 61)),
    "behind long contexts": ((1, 20), (12, 1600), (30, 900)),
}
SWITCHES = {
    "step": list(STEPS),
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "head_dim": [64, 128, 32, 80, 96, 112, 256],
    "group": [1, 2, 3, 4, 5, 6, 7, 8],
    "page": [16, 32, 64, 24],
    "window": [0, 7, 40],
    "causal": [True, False],
    "softcap": [0.0, 20.0],
    "sinks": [False, True],
    "bias": ["", "alibi", "distances"],
    "cache": ["same", "fp8"],
    "batch_invariant": [False, True],
}
# Float32 is there to compare with; nobody keeps an 8-bit cache for it.
CASES = [
    case | {"cache": "same"} if case["dtype"] is torch.float32 else case
    for case in pairwise(SWITCHES)
]
FEW = {
    "head_dim": [128, 80, 256],
    "group": [1, 3, 4, 8],
    "page": [16, 64, 24],
    "window": [0, 7],
}
SHORT = [case for case in pairwise({**SWITCHES, **FEW}) if case["dtype"] is not torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KV_HEADS = 2
MOST_DISTANCE = 2000


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert not got.isnan().any()
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def a_cache(case: dict[str, Any], rng: torch.Generator) -> Cache:
    shape, window = (KV_HEADS, case["head_dim"]), case.get("window", 0)
    cache = Cache(STEPS[case["step"]], shape, rng, case.get("page", 16), window)
    cache.meta.batch_invariant = case.get("batch_invariant", False)
    return cache


def a_variant(
    case: dict[str, Any], num_heads: int, rng: torch.Generator
) -> reference.AttentionOptions:
    is_fp8 = case.get("cache") == "fp8"
    return reference.AttentionOptions(
        scale=case["head_dim"] ** -0.5,
        window=case.get("window", 0),
        softcap=case.get("softcap", 0.0),
        causal=case.get("causal", True),
        sinks=torch.randn(num_heads, generator=rng) if case.get("sinks") else None,
        alibi=torch.rand(num_heads, generator=rng) / 8 if case.get("bias") == "alibi" else None,
        kv_scales=torch.rand(2, KV_HEADS, generator=rng) + 0.5 if is_fp8 else None,
        distances=(
            torch.randn(num_heads, 2 * MOST_DISTANCE + 1, generator=rng)
            if case.get("bias") == "distances"
            else None
        ),
    )


def as_recorded(meta: AttentionMeta, num_tokens: int) -> AttentionMeta:
    """The same sequences as a recorded step meets them: bounds instead of sizes, and padding."""
    last, padding = meta.query_start[-1:], torch.zeros(3, dtype=torch.int32)
    tables = torch.cat(
        (meta.block_tables, meta.block_tables.new_zeros(3, len(meta.block_tables[0])))
    )
    return dataclasses.replace(
        meta,
        query_start=torch.cat((meta.query_start, last.expand(3))),
        seq_lens=torch.cat((meta.seq_lens, padding)),
        block_tables=tables,
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=9000,
        scratch={},
        is_mixed=True,
    )


def queries(num: int, case: dict[str, Any], rng: torch.Generator) -> torch.Tensor:
    """Rows of a wider tensor, as the projection of queries, keys and values makes them."""
    heads, dim = KV_HEADS * case.get("group", 3), case["head_dim"]
    whole = torch.randn(num, (heads + 1) * dim, generator=rng)
    return whole.to(case["dtype"])[:, : heads * dim].view(num, heads, dim)


@pytest.mark.parametrize(
    "case",
    [*SHORT, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_attention_over_pairs_of_switches(case: dict[str, Any], rng: torch.Generator) -> None:
    check(case, rng)


def check(case: dict[str, Any], rng: torch.Generator) -> None:
    cache = a_cache(case, rng)
    q = queries(cache.num_tokens + 2, case, rng)  # two rows of no sequence
    kv = cache.kv.to(torch.float8_e4m3fn if case["cache"] == "fp8" else q.dtype)
    variant = a_variant(case, q.shape[1], rng)
    wanted = reference.paged_attention(q.double(), kv.double(), cache.meta, variant)
    assert torch.equal(wanted[-2:], torch.zeros_like(wanted[-2:]))

    tolerance = TOLERANCE[q.dtype]
    close(bodies.paged_attention(q, kv, cache.meta, variant), wanted, tolerance)
    if not case["batch_invariant"]:
        recorded = as_recorded(cache.meta, len(q))
        close(bodies.paged_attention(q, kv, recorded, variant), wanted, tolerance)
    if q.dtype is torch.float32 and case["page"] == 16:
        close(cpu.paged_attention(q.contiguous(), kv, cache.meta, variant), wanted, tolerance)
    close(reference.paged_attention(q, kv, cache.meta, variant), wanted, tolerance)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "page", "sinks"),
    [
        pytest.param(torch.bfloat16, 128, 4, 64, False, marks=pytest.mark.slow),
        (torch.float16, 80, 5, 24, True),
    ],
    ids=str,
)
def test_chunks_behind_long_contexts_take_narrow_tiles(
    dtype: torch.dtype, head_dim: int, group: int, page: int, sinks: bool, rng: torch.Generator
) -> None:
    cache = Cache(((1, 20), (33, 1100), (26, 0)), (KV_HEADS, head_dim), rng, page)
    case = {"dtype": dtype, "head_dim": head_dim, "group": group, "sinks": sinks}
    q = queries(cache.num_tokens, case, rng)
    kv, variant = cache.kv.to(dtype), a_variant(case, q.shape[1], rng)
    wanted = reference.paged_attention(q.double(), kv.double(), cache.meta, variant)
    for meta in (cache.meta, as_recorded(cache.meta, len(q))):
        # A step's plan is made by its first launches: these are not run.
        unrun = dataclasses.replace(meta, scratch={})
        found = launches(q, kv, unrun, variant, torch.empty_like(q))
        (chunks,) = (one for one in found if "work" in one.args)
        assert chunks.args["S"].KEYS == 32 and chunks.args["num_splits"] > 1
        close(bodies.paged_attention(q, kv, meta, variant), wanted, TOLERANCE[dtype])


def test_every_row_of_one_key_head(rng: torch.Generator) -> None:
    """One key head for 71 query heads, more than a tile of float32 holds."""
    cache = Cache(((1, 20), (9, 30)), (1, 64), rng)
    variant = reference.AttentionOptions(0.125)
    for dtype in (torch.float32, torch.float16):
        q = torch.randn(cache.num_tokens, 71, 64, generator=rng).to(dtype)
        kv = cache.kv.to(dtype)
        wanted = reference.paged_attention(q.double(), kv.double(), cache.meta, variant)
        close(bodies.paged_attention(q, kv, cache.meta, variant), wanted, TOLERANCE[dtype])


def test_a_recorded_step_holds_as_many_chunks_as_its_tokens_may_be(rng: torch.Generator) -> None:
    """Chunks of the least tokens, and no token of anything else."""
    least = tuning.MAX_DECODE_TOKENS + 1
    cache = Cache(((least, 0), (least, 40)) * 18, (1, 32), rng)
    q = torch.randn(cache.num_tokens, 2, 32, generator=rng)
    variant = reference.AttentionOptions(0.2)
    got = bodies.paged_attention(q, cache.kv, as_recorded(cache.meta, len(q)), variant)
    wanted = reference.paged_attention(q.double(), cache.kv.double(), cache.meta, variant)
    close(got, wanted, 2e-5)


def test_padding_of_a_graph_comes_out_as_zeros(rng: torch.Generator) -> None:
    """Rows that only fill a captured batch: sequences of no keys, with sinks or without."""
    cache = Cache(((1, 40), (1, 7), (1, 0)), (2, 32), rng)
    cache.meta.seq_lens[2] = 0
    cache.meta.block_tables[2] = 0
    q = torch.randn(3, 4, 32, generator=rng)
    for sinks in (None, torch.randn(4, generator=rng)):
        variant = reference.AttentionOptions(0.2, sinks=sinks)
        got = bodies.paged_attention(q, cache.kv, cache.meta, variant)
        assert torch.equal(got[2], torch.zeros(4 * 32))
        wanted = reference.paged_attention(q.double(), cache.kv.double(), cache.meta, variant)
        close(got, wanted, 2e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damage_stays_in_its_row(bad: float, rng: torch.Generator) -> None:
    cache = Cache(STEPS["mixed"], (2, 32), rng)
    q = torch.randn(cache.num_tokens, 4, 32, generator=rng)
    variant = reference.AttentionOptions(0.2)
    sound = bodies.paged_attention(q, cache.kv, cache.meta, variant)
    q[1, 0, 3] = bad
    got = bodies.paged_attention(q, cache.kv, cache.meta, variant)
    assert not got[1].isfinite().all()
    kept = torch.arange(len(q)) != 1
    assert torch.equal(got[kept], sound[kept])


def alone(meta: AttentionMeta, s: int, first: int, end: int) -> AttentionMeta:
    """Query tokens first .. end - 1 of sequence s as a step of their own."""
    query_len = int(meta.query_start[s + 1] - meta.query_start[s])
    seen = int(meta.seq_lens[s]) - query_len + end
    return AttentionMeta(
        query_start=torch.tensor([0, end - first], dtype=torch.int32),
        seq_lens=torch.tensor([seen], dtype=torch.int32),
        block_tables=meta.block_tables[s : s + 1],
        positions=torch.arange(seen - end + first, seen),
        slots=torch.zeros(end - first, dtype=torch.int64),
        block_size=meta.block_size,
        num_decodes=int(end - first == 1),
        max_query_len=end - first,
        max_seq_len=seen,
        batch_invariant=True,
    )


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_rows_do_not_hang_on_company(
    dtype: torch.dtype, window: int, rng: torch.Generator
) -> None:
    cache = Cache(STEPS["mixed"], (2, 32), rng, window=window)
    cache.meta.batch_invariant = True
    variant = reference.AttentionOptions(0.2, window)
    q, kv = torch.randn(cache.num_tokens, 6, 32, generator=rng).to(dtype), cache.kv.to(dtype)
    together = bodies.paged_attention(q, kv, cache.meta, variant)
    starts = cache.meta.query_start.tolist()
    for s, cuts in ((0, (0, 1)), (1, (0, 1)), (2, (0, 5)), (4, (0, 40)), (4, (0, 17, 40))):
        for first, end in itertools.pairwise(cuts):
            rows = slice(starts[s] + first, starts[s] + end)
            got = bodies.paged_attention(q[rows], kv, alone(cache.meta, s, first, end), variant)
            assert torch.equal(got, together[rows]), (s, first, end)
