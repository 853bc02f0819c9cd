"""The write of K and V with norms and rotary positions: each body against the reference.

Slots nobody writes hold NaN before and after.
"""

from typing import Any

import pytest
import torch
from support.paged_cache import Cache
from support.pairwise import pairwise

from kernels import cpu, reference
from kernels import triton as bodies

FP8 = torch.float8_e4m3fn
SWITCHES = {
    "rot": ["whole", "none", "part", "one pair"],
    "interleaved": [False, True],
    "norm": ["none", "head", "width"],
    "add_one": [False, True],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "cache": ["same", "fp8", "scaled fp8"],
    "head_dim": [64, 80, 32],
    "heads": [(6, 2), (8, 8), (5, 1)],
    "page": [16, 24],
    "tokens": ["few", "many"],
}
CASES = pairwise(SWITCHES)
STEPS = {"few": ((1, 20), (1, 40), (5, 0)), "many": ((1, 20), (64, 3))}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        got.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def a_rope(case: dict[str, Any], rng: torch.Generator) -> reference.Rope:
    dim = case["head_dim"]
    rot = {"whole": dim, "none": 0, "part": dim // 4 * 2, "one pair": 2}[case["rot"]]
    angles = torch.rand(200, rot // 2, generator=rng) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1) if rot else None
    return reference.Rope(table, case["interleaved"])


def a_norm(case: dict[str, Any], rng: torch.Generator) -> reference.HeadNorm:
    (heads, kv_heads), dim = case["heads"], case["head_dim"]
    sizes = {"none": None, "head": (dim, dim), "width": (heads * dim, kv_heads * dim)}[case["norm"]]
    weights: tuple = (None, None)
    if sizes:
        weights = tuple(torch.randn(size, generator=rng).to(case["dtype"]) for size in sizes)
    return reference.HeadNorm(*weights, 1e-6, case["add_one"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_write_over_pairs_of_switches(case: dict[str, Any], rng: torch.Generator) -> None:
    (heads, kv_heads), dim, dtype = case["heads"], case["head_dim"], case["dtype"]
    cache = Cache(STEPS[case["tokens"]], (kv_heads, dim), rng, case["page"])
    cache.meta.slots[1] = -1  # a row that only fills up
    rope, norm = a_rope(case, rng), a_norm(case, rng)
    scales = torch.rand(2, kv_heads, generator=rng) + 0.1 if "scaled" in case["cache"] else None
    qkv = torch.randn(cache.num_tokens, (heads + 2 * kv_heads) * dim + 7, generator=rng) * 3
    qkv = qkv.to(dtype)[:, :-7]
    qkv[0, 0], qkv[2, -1] = 3.0, 2000.0  # saturates where there are 8 bits
    kv = cache.kv.to(dtype if case["cache"] == "same" else FP8)
    shape = (heads, kv_heads, dim)

    wanted_kv = kv.clone()
    wanted = reference.qkv_rope_write(qkv, wanted_kv, cache.meta, shape, rope, norm, scales)
    tolerance = TOLERANCE[dtype]
    for body in (bodies, cpu) if dtype is torch.float32 else (bodies,):
        got_kv = kv.clone()
        given = qkv if body is bodies else qkv.contiguous()
        got = body.qkv_rope_write(given, got_kv, cache.meta, shape, rope, norm, scales)
        close(got, wanted, tolerance)
        # An 8-bit value may lie one step of its grid off.
        close(got_kv, wanted_kv, tolerance if case["cache"] == "same" else 0.13)
    exact = reference.qkv_rope_write(
        qkv.double(), kv.double(), cache.meta, shape, rope, norm, scales
    )
    close(wanted, exact, 6 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rounding_is_that_of_the_reference(
    interleaved: bool, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Bit for bit, but for a few sums of squares: greedy tokens hang on it."""
    case = {"head_dim": 64, "rot": "whole", "interleaved": interleaved, "dtype": dtype}
    case |= {"norm": "head", "add_one": False, "heads": (4, 2)}
    cache = Cache(STEPS["few"], (2, 64), rng)
    qkv = torch.randn(cache.num_tokens, 8 * 64, generator=rng).to(dtype)
    rope, norm = a_rope(case, rng), a_norm(case, rng)
    both = []
    for body in (bodies, reference):
        kv = cache.kv.to(dtype)
        q = body.qkv_rope_write(qkv, kv, cache.meta, (4, 2, 64), rope, norm)
        both.append(torch.cat((q.flatten(), kv.flatten())).nan_to_num(7.0))
    assert (both[0] == both[1]).float().mean() > 0.999


@pytest.mark.parametrize("has_scales", [False, True])
def test_what_is_no_number_is_none_in_a_cache_of_8_bits(
    has_scales: bool, rng: torch.Generator
) -> None:
    """A largest number that a device takes of one that is none would be 448 below zero."""
    cache = Cache(((3, 4),), (2, 32), rng)
    qkv = torch.randn(3, 8 * 32, generator=rng).bfloat16()
    qkv[1, 4 * 32], qkv[1, -1], qkv[2, 4 * 32] = float("nan"), float("nan"), float("inf")
    scales = torch.full((2, 2), 0.5) if has_scales else None
    rope, norm = reference.Rope(None, False), reference.HeadNorm(None, None, 1e-6, False)
    both = []
    for body in (bodies, reference):
        kv = torch.zeros_like(cache.kv).to(FP8)
        body.qkv_rope_write(qkv, kv, cache.meta, (4, 2, 32), rope, norm, scales)
        both.append(kv.float())
    assert both[1].isnan().sum() == 2 and both[1].nan_to_num(0).max() == 448
    assert torch.equal(both[0].nan_to_num(0), both[1].nan_to_num(0))
    assert torch.equal(both[0].isnan(), both[1].isnan())


def test_layers_of_one_step_may_lie_in_memory_in_other_ways(rng: torch.Generator) -> None:
    """A layer of its own, and one whose blocks lie between those of others."""
    cache = Cache(((1, 20), (1, 9), (12, 3)), (2, 32), rng)
    whole = torch.full((len(cache.kv), 3, *cache.kv.shape[1:]), float("nan"))
    rope, norm = reference.Rope(None, False), reference.HeadNorm(None, None, 1e-6, False)
    for kv in (cache.kv, whole[:, 1]):
        kv[:] = cache.kv
        qkv = torch.randn(cache.num_tokens, 8 * 32, generator=rng)
        wanted_kv = kv.clone()
        wanted = reference.qkv_rope_write(qkv, wanted_kv, cache.meta, (4, 2, 32), rope, norm)
        got = bodies.qkv_rope_write(qkv, kv, cache.meta, (4, 2, 32), rope, norm)
        close(got, wanted, 1e-6)
        close(kv, wanted_kv, 1e-6)
        attended = bodies.paged_attention(got, kv, cache.meta, reference.AttentionOptions(0.2))
        exact = (got.double(), kv.double())
        close(
            attended,
            reference.paged_attention(*exact, cache.meta, reference.AttentionOptions(0.2)),
            2e-5,
        )


def test_no_token_is_nothing_to_do() -> None:
    cache = Cache(((1, 3),), (2, 32), torch.Generator().manual_seed(0))
    none = reference.HeadNorm(None, None, 1e-6, False)
    rope = reference.Rope(None, False)
    empty = torch.zeros(0, 8 * 32)
    got = bodies.qkv_rope_write(empty, cache.kv, cache.meta, (4, 2, 32), rope, none)
    assert got.shape == (0, 4, 32)
