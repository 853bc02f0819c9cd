"""Layers with different needs: windows, several tables for a request, and sizes of the pool."""

from __future__ import annotations

import random

import pytest
from support.holders import fill, holder
from support.simulate import Run, expected, make_request, random_requests

from engine.config.cache import CacheConfig
from engine.config.decide import GIB, Decided, ModelFacts, decide_num_blocks
from engine.config.kv_groups import FULL as FULL_GROUP
from engine.config.kv_groups import (
    Group,
    longest_request,
    max_concurrency,
    request_blocks,
    sized,
    window_blocks,
)
from engine.config.sched import SchedulerConfig
from engine.core.starting import log_pool
from engine.errors import ConfigError, RequestError
from engine.kv.layout import (
    PagedKV,
    make_layout,
    one_group,
)
from engine.kv.manager import KVManager
from engine.sched.policies import POLICIES
from engine.sched.scheduler import Scheduler
from policylab.verify.fake import DigestWorker

T, F = 1, None


@pytest.mark.behaviour(68)
@pytest.mark.parametrize(
    ("cached", "window", "hit"),
    [
        ([T, T, F, T, F, F, T, T, F, T, T, T], 4, 12),
        ([T, T, F, T, F, F, T, T, F, F, F, F], 4, 8),
        ([T, T, F, T, F, F, T, F, F, T, F, F], 4, 2),
        ([T, F, F, T, F, F, T, F, F, T, F, F], 4, 1),  # all that there is before it
        ([F, F, F, T, F, F, T, F, F, T, F, F], 4, 0),
        ([F, F, T], 3, 3),
        ([F, F, T], 1, 3),
        ([T, T, F, T], 0, 2),
        ([T, T, T, T], 0, 4),
        ([], 4, 0),
    ],
)
def test_a_window_needs_only_the_last_blocks(cached, window, hit):
    assert Group(window=window).longest(cached, len(cached), 2) == hit


def windowed(num_blocks=40, *groups, **options):
    return KVManager(num_blocks, 2, groups=groups or [Group(window=4)], **options)


@pytest.mark.behaviour(68)
def test_blocks_out_of_the_window_are_null_and_free():
    kv = windowed()
    req = holder(0, list(range(10)))
    assert fill(kv, req) == [1, 2, 3, 4, 5]
    assert kv.missing(req, 12) == 0, "three entries will be given back for the new one"
    assert kv.reserve(req, 12)
    # The query at 10 sees 7, 8, 9 and itself: entry 3 and those behind it.
    assert kv.held(req)[:3] == [0, 0, 0] and kv.held(req)[3:5] == [4, 5]
    assert len(kv.held(req)) == 6 == kv.num_held[0]
    assert kv.num_free == 39 - 3 and kv.cache.hash_of(1) is not None, "they are still cached"
    rows, indices, blocks, _ = kv.drain()
    assert (0, 0, 0) in zip(rows, indices, blocks, strict=True)
    kv.finish(req)
    assert kv.num_free == 39 and kv.pool.num_refs == [0] * 40


@pytest.mark.behaviour(68)
def test_decoding_in_bulk_trims_too():
    kv = windowed()
    req = holder(0, list(range(10)))
    fill(kv, req)
    for _ in range(5):
        kv.reserve_next([0])
    assert [block > 0 for block in kv.held(req)] == [False] * 7 + [True] * 3


@pytest.mark.behaviour(68)
def test_tokens_in_flight_do_not_move_the_window():
    kv = windowed()
    req = holder(0, list(range(10)))
    fill(kv, req)
    req.num_computed = 14  # four drafts that may be refused
    assert kv.reserve(req, 16) and kv.held(req)[3:5] == [4, 5]


@pytest.mark.behaviour(68)
def test_a_hit_after_a_hole_is_adopted_with_null_blocks():
    kv = windowed()
    writer = holder(0, list(range(12)))
    blocks = list(fill(kv, writer))
    kv.cache.unpublish(blocks[1])
    reader = holder(1, [*range(12), 0])
    assert kv.cached_prefix(reader) == 12
    assert kv.missing(reader, 13) == 1
    assert fill(kv, reader)[:6] == [0, 0, 0, 0, *blocks[4:6]]
    kv.finish(writer)
    kv.finish(reader)
    assert kv.num_free == 39


@pytest.mark.behaviour(69)
def test_a_hit_must_be_one_in_every_group():
    full, window = Group(), Group(window=4)
    kv = windowed(60, full, window)
    writer, reader = holder(0, list(range(20))), holder(1, [*range(20), 0])
    fill(kv, writer)
    assert kv.cached_prefix(reader) == 20 and len(kv.held(writer, 1)) == 10
    kv.cache.unpublish(kv.held(writer, 1)[2])
    assert kv.cached_prefix(reader) == 20, "out of the window"
    kv.cache.unpublish(kv.held(writer, 1)[9])
    assert kv.cached_prefix(reader) == 18
    kv.cache.unpublish(kv.held(writer, 0)[7])
    assert kv.cached_prefix(reader) == 14
    kv.cache.unpublish(kv.held(writer, 1)[6])
    assert kv.cached_prefix(reader) == 12, "its own hole, and those two before the end"
    kv.cache.unpublish(kv.held(writer, 0)[0])
    assert kv.cached_prefix(reader) == 0


@pytest.mark.behaviour(69)
def test_the_same_content_has_a_block_in_each_group():
    kv = windowed(60, Group(), Group(window=4), Group(window=6))
    req = holder(0, list(range(8)))
    assert kv.missing(req, 8) == 12 and kv.reserve(req, 8) and kv.num_free == 59 - 12
    assert [kv.held(req, g) for g in range(3)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    deltas = list(zip(*kv.drain(), strict=True))
    assert deltas[4:6] == [(0, 0, 5, 1), (0, 1, 6, 1)]
    kv.commit(req, 8)
    assert len(set(kv.cache.hashes) - {None}) == 12
    assert kv.fits(holder(1, [5] * 40), 44, freeing=[]) is False
    assert kv.fits(holder(1, [5] * 38), 38, freeing=[req]) is True


@pytest.mark.behaviour(68)
@pytest.mark.parametrize("groups", [(1,), (0, 1), (2, 1)])
def test_a_block_that_left_a_short_window_before_it_was_full_is_not_cached(groups):
    """With steps in flight a table grows before the tokens of its last block are known."""
    kv = windowed(60, *(Group(window=window) for window in groups))
    reqs = [holder(row, list(range(10 * row, 10 * row + 4))) for row in (0, 1)]
    for req in reqs:
        assert kv.reserve(req, 4)
    kv.reserve_next([0, 1])
    kv.commit(reqs[0], 2)
    kv.commit_next(reqs[1:])
    kv.commit_next(reqs)
    for g, window in enumerate(groups):
        kept = {0: [1, 1], 1: [0, 0], 2: [0, 1]}[window]
        assert [block > 0 for block in kv.held(reqs[0], g)] == [*map(bool, kept), True]
        assert sum(kv.cache.hash_of(block) is not None for block in kv.held(reqs[0], g)) == sum(
            kept
        )
    for req in reqs:
        kv.finish(req)
    assert kv.num_free == 59


# -- whole runs: a block given back too early becomes a wrong token


def make_run(*windows, size, budget, num_blocks, seats=4, depth=1):
    groups = [
        Group(window=window, max_blocks=window_blocks(window, budget, size) if window else 0)
        for window in windows
    ]
    kv = KVManager(num_blocks, size, groups=groups)
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seats, max_model_len=64)
    scheduler = Scheduler(config, kv, POLICIES["fcfs"](), clock=lambda: 0.0)
    return Run(scheduler, DigestWorker(kv.num_blocks, size, windows=windows), depth)


def random_run(rng, *windows, depth=1):
    return make_run(
        *windows,
        size=rng.choice([1, 2, 3, 4]),
        budget=rng.choice([8, 16, 64]),
        num_blocks=rng.randint(20, 80) * len(windows),
        seats=rng.randint(1, 8),
        depth=depth,
    )


@pytest.mark.behaviour(69)
@pytest.mark.parametrize("windows", [(4,), (0, 4), (0, 3, 7), (9, 2)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_windows_do_not_change_what_is_generated(windows, depth, seed):
    for turn in range(12):
        rng = random.Random(seed + turn)
        run = random_run(rng, *windows, depth=depth)
        requests = random_requests(rng, 16)
        added = []
        for request in requests:
            try:
                run.add(request)
                added.append(request)
            except RequestError:
                continue
            if rng.random() < 0.3:
                run.step()
        run.drain(limit=2000)
        for request in added:
            right = expected(request.prompt_token_ids, request.max_tokens)
            assert run.outputs[request.request_id] == right, f"seed {seed + turn}"


@pytest.mark.behaviour(68)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_a_window_a_pool_holds_requests_longer_than_itself(depth):
    run = make_run(4, size=4, budget=8, num_blocks=6, depth=depth)  # room for 20 tokens
    prompts = [list(range(start, start + 40)) for start in (0, 100)]
    for name, prompt in zip("ab", prompts, strict=True):
        run.add(make_request(name, prompt, 20))
    run.drain()
    assert [run.outputs[name] for name in "ab"] == [expected(prompt, 20) for prompt in prompts]


# -- sizes


@pytest.mark.behaviour(75)
def test_concurrency_is_that_of_requests_of_full_length():
    assert f"{max_concurrency(1536, [Group()], 16, 16384):.2f}" == "1.50"
    groups = [Group(), Group(window=1024, max_blocks=window_blocks(1024, 2048, 16))]
    assert f"{max_concurrency(1536, groups, 16, 16384):.2f}" == "1.26"


@pytest.mark.parametrize(
    ("groups", "lines"),
    [
        (
            [FULL_GROUP],
            ["1000 blocks of 16 tokens, 0.01 GiB, enough for 16000 tokens: 15.62 requests of 1024"],
        ),
        (
            [FULL_GROUP, Group(window=64), Group(window=64), Group(window=128, is_chunked=True)],
            [
                "enough for 12337 tokens: 12.05 requests of 1024 tokens while they decode, 8.40 "
                "while all prefill",
                "KV groups with full attention: 1; such a request holds 64 blocks in each",
                "sliding windows of 64 tokens: 2; such a request holds 5 blocks in each while it "
                "decodes, 17 at most",
                "chunks of 128 tokens: 1; such a request holds 9 blocks in each while it decodes",
            ],
        ),
    ],
)
def test_the_start_says_how_many_tokens_and_requests_fit(groups, lines, caplog):
    decided = Decided(
        max_model_len=1024,
        num_kv_blocks=1001,
        block_size=16,
        vocab_size=9,
        eos_token_ids=(),
        device="cpu",
        scheduler=SchedulerConfig(),
        kv_groups=sized(groups, 256 - 63, 16),
    )
    with caplog.at_level("INFO", logger="engine"):
        log_pool(decided, ModelFacts(vocab_size=9, block_bytes=10_000))
    for text in lines:
        assert text in caplog.text
    assert caplog.text.count("\n") == max(1, len({*groups}) + (len(groups) > 1))


@pytest.mark.behaviour(76)
@pytest.mark.parametrize(
    ("window", "budget", "size", "blocks"),
    [(1024, 1024, 16, 129), (128, 1, 16, 9), (2, 1, 1, 3), (1, 16, 16, 2), (4, 2, 2, 4)],
)
def test_blocks_of_a_window(window, budget, size, blocks):
    assert window_blocks(window, budget, size) == blocks == -(-(window - 1 + budget) // size) + 1


QWEN_7B_BLOCK = 32 * PagedKV(num_kv_heads=32, head_dim=128, dtype_bytes=2).token_bytes * 16


def blocks_in(num_bytes, max_model_len):
    return decide_num_blocks(
        CacheConfig(kv_cache_memory_bytes=num_bytes),
        block_size=16,
        block_bytes=QWEN_7B_BLOCK,
        budget_bytes=0,
        max_model_len=max_model_len,
        max_num_seqs=1,
    )


@pytest.mark.behaviour(77, 78)
def test_too_little_memory_says_how_much_and_what_would_fit():
    """8 GiB hold 16384 tokens; the null block comes on top."""
    memory = 8 * GIB + QWEN_7B_BLOCK
    assert blocks_in(memory, 16384) == 1025
    with pytest.raises(
        ConfigError,
        match=r"max_model_len 16385 needs 8\.02 GiB of KV cache, 8\.01 GiB .* at most 16384, or",
    ):
        blocks_in(memory, 16385)


def test_a_length_of_nothing_is_no_advice():
    with pytest.raises(ConfigError, match="GiB are available; give more memory"):
        blocks_in(1000, 16384)


def layout_of(windows, max_model_len=32768):
    layers = [PagedKV(num_kv_heads=2, head_dim=64, window=window) for window in windows]
    sizes = {"block_size": 16, "max_num_batched_tokens": 512, "max_model_len": max_model_len}
    return make_layout(layers, **sizes)


def test_layers_with_the_same_window_form_groups():
    """Layers of a group lie in different parts of a block; those of another lie in the same."""
    layout = layout_of((1024, 1024, 0) * 4 + (1024,))
    assert layout.windows == (0, 1024, 1024, 1024) and layout.num_tensors == 4
    places = list(zip(layout.group_of, layout.parts, strict=True))
    assert len(set(places)) == 13 and [places[layer] for layer in (2, 5, 8, 11)] == [
        (0, part) for part in range(4)
    ]
    assert [group.max_blocks for group in layout.groups] == [0, *[window_blocks(1024, 512, 16)] * 3]
    assert layout.block_bytes == 4 * 2 * 2 * 64 * 4 * 16


@pytest.mark.parametrize(
    ("windows", "shape"),
    [
        ((1024,) * 4 + (0,), (1, 5)),  # parts of a block, groups
        (((1024,) * 5 + (0,)) * 10 + (1024, 1024), (10, 7)),  # Gemma 3 27B
        ((128, 0) * 12, (12, 2)),  # gpt-oss 20B
        ((4096,) * 32, (32, 1)),  # Mistral 7B v0.1
        ((0,) * 32, (32, 1)),
    ],
    ids=["one in five", "gemma-3-27b", "gpt-oss-20b", "mistral-7b", "full"],
)
def test_a_request_takes_what_its_layers_need(windows, shape):
    layout = layout_of(windows)
    assert (layout.num_tensors, len(layout.groups)) == shape
    kept = sum(layout.num_tensors * min(w or 32768, 32768) for w in layout.windows)
    assert kept <= 1.025 * sum(min(w or 32768, 32768) for w in windows)


def test_one_group_keeps_everything_where_windows_are_not_freed():
    layers = [PagedKV(num_kv_heads=2, head_dim=64, window=window) for window in (1024, 0, 1024)]
    layout = one_group(layers, 16)
    assert layout.groups == (FULL_GROUP,) and layout.parts == (0, 1, 2)


@pytest.mark.parametrize(
    ("groups", "usable", "longest"),
    [
        ([Group()], 10, 160),
        ([Group(), Group()], 11, 80),
        ([Group(), Group(window=64, max_blocks=6)], 16, 160),
        ([Group(), Group(window=64, max_blocks=6)], 8, 64),
        ([Group(window=64, max_blocks=6)], 6, None),
        ([Group(window=64, max_blocks=6)], 5, 80),
    ],
)
def test_the_longest_request_of_a_pool(groups, usable, longest):
    assert longest_request(usable, groups, 16) == longest
    if longest is not None:
        assert request_blocks(groups, 16, longest) <= usable
        assert request_blocks(groups, 16, longest + 1) > usable
