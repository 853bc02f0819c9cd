"""Shares of decode attention: every tile that a sequence sees is read, and read once."""

import random

import pytest
import torch
from support.paged_cache import Cache

from kernels import AttentionMeta, reference, tuning
from kernels import triton as bodies
from kernels.triton.shares import SharesPlan
from kernels.tuning import Shares

KEYS = 16


def a_meta(sequences: list[tuple[int, int]]) -> AttentionMeta:
    """sequences: new tokens, and keys with them."""
    counts = torch.tensor([0, *(new for new, _ in sequences)])
    return AttentionMeta(
        query_start=counts.cumsum(0).to(torch.int32),
        seq_lens=torch.tensor([keys for _, keys in sequences], dtype=torch.int32),
        block_tables=torch.zeros(len(sequences), 1, dtype=torch.int32),
        positions=torch.zeros(1),
        slots=torch.zeros(1),
        block_size=KEYS,
        num_decodes=0,
        max_query_len=1,
        max_seq_len=1,
    )


def planned(meta: AttentionMeta, shares: Shares, most_tokens: int, window: int) -> SharesPlan:
    sizes = (len(meta.seq_lens), most_tokens)
    plan, launches = SharesPlan.of(meta, shares, sizes, KEYS, window)
    for launch in launches:
        launch.run()
    return plan


def tiles_of(new: int, keys: int, window: int) -> tuple[int, int]:
    first = max(keys - new - window + 1, 0) // KEYS if window else 0
    return first, -(-keys // KEYS)


def test_every_tile_is_read_once(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(30):
        most_tokens, window = dice.choice((1, 8)), dice.choice((0, 40))
        sequences = []
        for _ in range(dice.choice((1, 3, 70, 150))):
            new = dice.choice((0, 1, 1, 1, most_tokens, 9))
            most = dice.choice((1, 50, 400, 9000))
            sequences.append((new, dice.randint(new, new + most) if dice.random() < 0.9 else 0))
        shares = Shares(dice.choice((1, 7, 33)), dice.choice((16, 128)))
        plan = planned(a_meta(sequences), shares, most_tokens, window)
        items = [item for item in plan.items.tolist() if item[0] >= 0]
        used = [slot for *_, slot in items if slot >= 0]
        assert used == list(range(len(used))) and len(used) <= plan.num_slots
        for seq, (new, keys) in enumerate(sequences):
            own = [item[1:] for item in items if item[0] == seq]
            first, count = plan.spans[seq].tolist()
            if not 0 < new <= most_tokens:
                assert not own and count == 0, (seq, new)
                continue
            begin, end = tiles_of(new, keys, window)
            read = [tile for start, stop, _ in own for tile in range(start, stop)]
            assert read == list(range(begin, end)), (seq, own)
            slots = [slot for *_, slot in own]
            assert slots == ([-1] if count == 0 else list(range(first, first + count)))
            assert count != 1


def test_one_long_sequence_among_many_is_shared_out() -> None:
    """No program reads more than 1.5 times its share of all."""
    shares = tuning.decode_shares("sm_90", 64 * 8, 8, 131_072)
    assert shares is not None
    sequences = [(1, 1024)] * 63 + [(1, 100_000)]
    plan = planned(a_meta(sequences), shares, 1, 0)
    reads = [end - first for seq, first, end, _ in plan.items.tolist() if seq >= 0]
    assert max(reads) <= 1.5 * max(sum(reads) / shares.num, shares.least_keys / KEYS)


@pytest.mark.parametrize(
    "group", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(6, marks=pytest.mark.slow)]
)
def test_a_long_sequence_among_short_ones(group: int, seed: int) -> None:
    """More sequences than fill a device, so that a plan cuts the long one alone."""
    rng = torch.Generator().manual_seed(seed)
    cache = Cache(((1, 9000), *[(1, 3)] * 140), (2, 32), rng, 64)
    q = torch.randn(cache.num_tokens, 2 * group, 32, generator=rng)
    variant = reference.AttentionOptions(0.2)
    wanted = reference.paged_attention(q.double(), cache.kv.double(), cache.meta, variant)
    got = bodies.paged_attention(q, cache.kv, cache.meta, variant)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-5)
