"""A KV cache of 8 bits on a CPU: rows as they are written, and attention that reads them.

Cache slots that no sequence owns are NaN: reading one would show.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.paged_cache import Cache, assert_near

from kernels import AttentionMeta, cpu, reference
from kernels.cpu.attention import PAIRED, paged_attention
from kernels.reference.kv_rows import decode_rows, encode_rows

KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Head size, and query heads a key head: of the tiny models, whose kernels other tests compile too.
SHAPES = {torch.float32: (16, 2), torch.bfloat16: (64, 3)}
NO_NORM = reference.HeadNorm(None, None, 1e-6, False)
NO_ROPE = reference.Rope(None, False)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> torch.dtype:
    return KINDS[request.param]


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def written(
    keys: torch.Tensor, values: torch.Tensor, kind: torch.dtype, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows [N, 2, heads, bytes] of keys and values [N, heads, D], written to scattered blocks."""
    num, heads, head_dim = keys.shape
    block = 4
    slots = torch.randperm(num + 8)[:num] + block
    blank = encode_rows(torch.zeros(head_dim), kind)
    layer = blank.repeat(num + 4, 2, heads, block, 1)
    meta = AttentionMeta(
        query_start=torch.tensor([0, num], dtype=torch.int32),
        seq_lens=torch.tensor([num], dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        positions=torch.arange(num),
        slots=slots,
        block_size=block,
        num_decodes=0,
        max_query_len=num,
        max_seq_len=num,
    )
    qkv = torch.cat([keys, keys, values], dim=1).flatten(1)
    shape = (heads, heads, head_dim)
    cpu.qkv_rope_write(qkv, layer, meta, shape, NO_ROPE, NO_NORM, scales)
    return layer[slots // block, :, :, slots % block]


def same_bytes(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 40, 64])
def test_rows_are_written_as_the_reference_does(
    kind: torch.dtype, dtype: torch.dtype, head_dim: int, rng: torch.Generator
) -> None:
    """Rows contain zeros, numbers near float32's smallest, and numbers that e4m3 clamps."""
    powers = torch.randint(-140, 100, (64, 1, 1), generator=rng).float()
    x = torch.randn(64, 3, head_dim, generator=rng) * 2.0**powers
    x = torch.cat([x, torch.randn(64, 3, head_dim, generator=rng), torch.zeros(1, 3, head_dim)])
    x = x.to(dtype)
    wanted = encode_rows(torch.stack([x, -x], dim=1).float(), kind)
    assert same_bytes(written(x, -x, kind), wanted)


def test_scaled_floats_are_written_as_the_reference_does(rng: torch.Generator) -> None:
    x, kind = torch.randn(40, 2, 64, generator=rng) * 20, torch.float8_e4m3fn
    scales = torch.rand(2, 2, generator=rng) + 0.05
    wanted = torch.stack([x / scales[0][:, None], x / scales[1][:, None]], dim=1)
    assert same_bytes(written(x, x, kind, scales), encode_rows(wanted, kind))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_show(bad: float, rng: torch.Generator) -> None:
    """In their row alone. 8-bit floats have no infinity: it is clamped, as on a GPU."""
    x = torch.randn(5, 2, 16, generator=rng)
    x[3, 1, 7] = bad
    read = decode_rows(written(x, x, torch.int8))
    assert not read[3, :, 1].isfinite().any()
    read[3, :, 1] = 0
    assert read.isfinite().all()
    read = written(x, x, torch.float8_e4m3fn).float()
    assert read[3, :, 1, 7].isnan().all() if bad != bad else (read[3, :, 1, 7].abs() == 448).all()


def test_integers_are_within_half_a_step(rng: torch.Generator) -> None:
    x = torch.randn(200, 2, 64, generator=rng)
    off = (decode_rows(written(x, x, torch.int8))[:, 0] - x).abs()
    assert (off <= x.abs().amax(-1, keepdim=True) * (0.5001 / 127)).all()


def attend(q: torch.Tensor, cache: Cache, options: reference.AttentionOptions) -> torch.Tensor:
    return paged_attention(q, cache.kv, cache.meta, options)


def agrees(q: torch.Tensor, cache: Cache, options: reference.AttentionOptions) -> None:
    """Attention is that of the decoded cache in float64."""
    got = attend(q, cache, options)
    if q.dtype is torch.bfloat16:
        is_rounded = PAIRED is not None
        read_as = torch.bfloat16 if is_rounded else torch.float32
        assert_near(got, q, cache, options, weights_rounded=is_rounded, read_as=read_as)
        return
    numbers = cache.decoded(torch.float32, options.kv_scales)
    plain = options._replace(kv_scales=None)
    wanted = reference.paged_attention(q.double(), numbers, cache.meta, plain)
    assert torch.allclose(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_any_step(dtype: torch.dtype, seed: int) -> None:
    """Random steps, blocks and options, for each kind of cache. A token's outputs are those that it
    has alone, to the last bit."""
    dice, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, (head_dim, group) = 2, SHAPES[dtype]
    for kind in 2 * list(KINDS.values()):
        lengths = [dice.choice((1, 15, 16, 63, 64, 255, 256, 300, 700)) for _ in range(4)]
        singles = [(1, length) for length in lengths[:2]]
        step = [*singles, *((dice.choice((2, 17, 50)), length) for length in lengths[2:])]
        window = dice.choice((0, 0, 7, 100, 300))
        block = dice.choice((16, 16, 32, 64))
        cache = Cache(step, (heads, head_dim), rng, block=block, window=window, dtype=kind)
        is_scaled = kind is torch.float8_e4m3fn and dice.random() < 0.7
        options = reference.AttentionOptions(
            scale=0.15,
            window=window,
            softcap=dice.choice((0.0, 20.0)),
            sinks=torch.randn(heads * group, generator=rng) if dice.random() < 0.5 else None,
            kv_scales=torch.rand(2, heads, generator=rng) + 0.5 if is_scaled else None,
        )
        q = torch.randn(cache.num_tokens, heads * group, head_dim, generator=rng).to(dtype)
        agrees(q, cache, options)
        together = attend(q, cache, options)
        for s in range(len(step)):
            last = int(cache.meta.query_start[s + 1]) - 1
            alone = paged_attention(q[last : last + 1], cache.kv, last_of(cache, s), options)
            assert torch.equal(alone[0], together[last])


def last_of(cache: Cache, s: int) -> AttentionMeta:
    """The step of a sequence's last token alone."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "block"),
    [
        (torch.bfloat16, 24, 2, 8),
        (torch.bfloat16, 128, 20, 16),
        (torch.bfloat16, 96, 1, 24),
        (torch.bfloat16, 48, 50, 4),
        (torch.float32, 80, 2, 12),
        (torch.float32, 8, 1, 16),
    ],
)
def test_attention_of_other_shapes(
    dtype: torch.dtype, head_dim: int, group: int, block: int, rng: torch.Generator
) -> None:
    for kind in KINDS.values():
        step = ((1, 0), (1, 300), (5, 0), (17, 13), (3, 500))
        cache = Cache(step, (2, head_dim), rng, block=block, dtype=kind)
        q = torch.randn(cache.num_tokens, 2 * group, head_dim, generator=rng).to(dtype)
        agrees(q, cache, reference.AttentionOptions(scale=head_dim**-0.5))


def test_every_code_of_8_bit_floats_is_read_as_torch_does() -> None:
    """Each query attends to one key, so its output is the value that was read for that code."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    (head_dim, group), num = SHAPES[torch.float32], 16
    rows = codes.view(num, head_dim)
    layer = torch.zeros(num, 2, 1, 16, head_dim).to(codes.dtype)
    layer[:, 1, 0, 0] = rows
    meta = AttentionMeta(
        query_start=torch.arange(num + 1, dtype=torch.int32),
        seq_lens=torch.ones(num, dtype=torch.int32),
        block_tables=torch.arange(num, dtype=torch.int32)[:, None].contiguous(),
        positions=torch.zeros(num, dtype=torch.int64),
        slots=torch.zeros(num, dtype=torch.int64),
        block_size=16,
        num_decodes=num,
        max_query_len=1,
        max_seq_len=1,
    )
    q = torch.ones(num, group, head_dim)
    got = cpu.paged_attention(q, layer, meta, reference.AttentionOptions(scale=1.0))
    for head in got.view(num, group, head_dim).unbind(1):
        assert torch.equal(head.nan_to_num(1e9), rows.float().nan_to_num(1e9))
