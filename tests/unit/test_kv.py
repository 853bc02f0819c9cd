"""Block pool, hashes and prefix cache: who holds what, what may be found, what dies first."""

from __future__ import annotations

import pytest
from simulate import make_request, make_run, make_scheduler

from engine.kv.block_pool import BlockPool


def add(scheduler, name, prompt, **fields):
    return scheduler.add_request(make_request(name, prompt, **fields))


def test_blocks_come_from_the_head_and_cached_ones_die_last():
    pool = BlockPool(8)
    assert pool.take(3) == [1, 2, 3]
    pool.publish(1, b"one")
    pool.release([1, 2, 3])
    assert pool.free_order() == [2, 3, 4, 5, 6, 7, 1]
    assert pool.find(b"one") == 1
    pool.adopt([1])
    assert pool.free_order() == [2, 3, 4, 5, 6, 7]
    pool.release([1])
    assert pool.take(7)[-1] == 1
    assert pool.find(b"one") is None, "content of a block that was taken is gone"


def test_a_block_cannot_be_released_twice():
    pool = BlockPool(4)
    pool.release(pool.take(1))
    with pytest.raises(AssertionError, match="block 1 released"):
        pool.release([1])


def test_twins_stay_until_both_are_evicted():
    pool = BlockPool(4)
    one, two = pool.take(2)
    pool.publish(one, b"same")
    pool.publish(two, b"same")
    pool.unpublish(one)
    assert pool.find(b"same") == two


def test_a_hit_leaves_the_last_token_to_compute():
    run = make_run(block_size=16)
    prompt = list(range(64))
    run.add(make_request("a", prompt, 1))
    run.drain()
    kv = run.scheduler.kv
    req = add(run.scheduler, "b", prompt)
    assert kv.lookup(req).num_tokens == 48


def test_prompts_share_what_they_have_in_common():
    run = make_run(block_size=16)
    run.add(make_request("a", list(range(55)), 1))
    run.drain()
    req = add(run.scheduler, "b", [*range(48), 7, 7, 7, 7, 7])
    assert run.scheduler.kv.lookup(req).num_tokens == 48
    assert run.scheduler.kv.missing(req, 53) == 1 + 3  # cached blocks are free ones until adopted


@pytest.mark.parametrize(("salt", "hit"), [("x", 48), ("y", 0), (None, 0)])
def test_a_salt_separates_caches(salt, hit):
    run = make_run(block_size=16)
    run.add(make_request("a", list(range(64)), 1, cache_salt="x"))
    run.drain()
    req = add(run.scheduler, "b", list(range(64)), cache_salt=salt)
    assert run.scheduler.kv.lookup(req).num_tokens == hit


def test_caching_off_never_hits():
    run = make_run(caching=False)
    for name in "ab":
        run.add(make_request(name, list(range(64)), 1))
        run.drain()
    assert run.num_tokens == 128
    assert run.scheduler.make_stats().prefix_queries == 0


def test_the_cache_is_reset_only_while_nobody_holds_a_block():
    run = make_run(block_size=16)
    run.add(make_request("a", list(range(64)), 5))
    run.step()
    assert not run.scheduler.reset_prefix_cache()
    run.drain()
    assert run.scheduler.reset_prefix_cache()
    req = add(run.scheduler, "b", list(range(64)))
    assert run.scheduler.kv.lookup(req).num_tokens == 0


def test_reserve_is_all_or_nothing():
    scheduler = make_scheduler(num_blocks=5, block_size=4, max_model_len=64)
    kv = scheduler.kv
    req = add(scheduler, "a", [1] * 8, max_tokens=4)
    assert not kv.fits(req, 17) and not kv.reserve(req, 17)
    assert kv.held(req) == [] and kv.pool.num_free == 4
    assert kv.reserve(req, 16) and kv.reserve(req, 5)
    assert kv.held(req) == [1, 2, 3, 4]


def test_multi_turn_reuses_prompt_and_output():
    run = make_run(block_size=16)
    prompt = list(range(40))
    run.add(make_request("a", prompt, 30))
    run.drain()
    turn = prompt + run.outputs["a"] + [5] * 10
    req = add(run.scheduler, "b", turn)
    assert run.scheduler.kv.lookup(req).num_tokens == (40 + 30 - 1) // 16 * 16
