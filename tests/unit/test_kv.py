"""Block pool, prefix cache and the manager's questions: who holds what, what dies first."""

from __future__ import annotations

import random

import pytest
from support.holders import fill, holder

from engine.kv.block_pool import BlockPool
from engine.kv.manager import KVManager
from engine.kv.tables import peak_blocks


@pytest.mark.behaviour(73)
def test_the_free_list_keeps_order_and_count():
    pool = BlockPool(8)
    assert pool.take(3) == [1, 2, 3]
    pool.cache.publish(1, b"one")
    pool.cache.publish(2, b"two")
    pool.release([1, 2, 3])  # 3 has no hash: to the head; 2 before 1: the tail dies first
    assert pool.free_order() == [3, 4, 5, 6, 7, 2, 1] and pool.num_free == 7
    pool.adopt([2])  # out of the middle
    assert pool.free_order() == [3, 4, 5, 6, 7, 1] and pool.num_free == 6
    pool.release([2])
    assert pool.free_order() == [3, 4, 5, 6, 7, 1, 2]
    assert pool.take(0) == [] and pool.take(7)[-1] == 2
    assert pool.cache.find(b"one") is None, "content of a block that was taken is gone"
    assert pool.free_order() == [] and pool.num_free == 0
    with pytest.raises(ValueError, match="No free blocks: 1 wanted, 0 free"):
        pool.take(1)


@pytest.mark.behaviour(73)
def test_a_take_that_fails_takes_nothing():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="No free blocks: 4 wanted, 3 free"):
        pool.take(4)
    assert pool.free_order() == [1, 2, 3] and pool.num_refs == [0, 0, 0, 0]


@pytest.mark.behaviour(74)
def test_a_block_in_the_wrong_state_is_named():
    pool = BlockPool(4)
    pool.release(pool.take(1))
    with pytest.raises(RuntimeError, match="block 1 released more often than taken"):
        pool.release([1])
    with pytest.raises(RuntimeError, match="block 2 cannot be adopted"):
        pool.adopt([2])
    pool.take(1)
    pool.cache.publish(1, b"one")
    with pytest.raises(RuntimeError, match="block 1 cannot be published"):
        pool.cache.publish(1, b"other")


@pytest.mark.behaviour(64)
def test_twins_stay_until_each_is_evicted():
    pool = BlockPool(5)
    lost = []
    pool.cache.on_loss = lost.append
    for block in pool.take(3):
        pool.cache.publish(block, b"same")
    assert pool.cache.find(b"same") == 1 and pool.cache.find_all(b"same") == [1, 2, 3]
    pool.cache.unpublish(2)
    assert pool.cache.find_all(b"same") == [1, 3]
    pool.cache.unpublish(1)
    assert pool.cache.find(b"same") == 3 and lost == []
    pool.cache.unpublish(3)
    assert pool.cache.find(b"same") is None and lost == [b"same"]


def test_a_question_is_not_asked_twice_and_new_content_is_seen():
    kv = KVManager(20, 4)
    writer, reader = holder(0, list(range(20))), holder(1, list(range(20)))
    assert kv.cached_prefix(reader) == 0
    assert kv.reserve(writer, 20)
    hits = []
    for upto in (4, 9, 20):
        kv.commit(writer, upto)
        hits.append(kv.cached_prefix(reader))
        assert kv.lookup(reader) is kv.lookup(reader)
    assert hits == [4, 8, 16]
    kv.revoke(writer, 8, [])
    kv.cache.unpublish(kv.held(writer)[1])
    assert kv.cached_prefix(reader) == 4, "what was lost is not remembered"


def test_ready_is_the_hit_first_and_what_was_adopted_then():
    kv = KVManager(20, 16)
    writer, reader = holder(0, [1] * 40), holder(1, [1] * 48)
    fill(kv, writer)
    assert kv.ready(reader) == 32
    assert kv.reserve(reader, 48)
    assert kv.ready(reader) == 32 and kv.num_adopted(reader) == 2
    kv.release(reader)
    assert kv.ready(reader) == 32 and kv.held(reader) == []


def brute_force_peak(lengths, remaining, size):
    most = 0
    for step in range(1, max(remaining) + 1):
        live = [n for n, left in zip(lengths, remaining, strict=True) if left >= step]
        most = max(most, sum(-(-(n + step - 1) // size) for n in live))
    return most


def test_the_peak_is_what_a_simulation_of_all_steps_finds(seed):
    rng = random.Random(seed)
    for _ in range(200):
        size, count = rng.choice([1, 2, 5, 16]), rng.randint(1, 12)
        lengths = [rng.randint(1, 60) for _ in range(count)]
        remaining = [rng.randint(1, 40) for _ in range(count)]
        assert peak_blocks(lengths, remaining, size) == brute_force_peak(lengths, remaining, size)


def test_the_peak_of_nobody_is_nothing():
    kv = KVManager(10, 16)
    assert kv.peak([], len) == 0
    reqs = [holder(0, [1] * 16), holder(1, [1] * 17)]
    assert kv.peak(reqs, lambda req: 1) == 3
    assert kv.peak(reqs, lambda req: 2) == 4


def test_blocks_belong_to_the_request_and_not_to_the_list_its_tokens_are_in():
    """A request was known by its array of tokens, and its blocks were lost with that."""
    kv = KVManager(10, 4)
    req = holder(0, list(range(8)))
    blocks = fill(kv, req)
    req.tokens = req.tokens[:]
    assert kv.held(req) == blocks
    twin = holder(0, [])  # another request that has this row, and these very tokens
    twin.tokens = req.tokens
    assert kv.held(twin) == []
    kv.release(req)
    assert kv.num_free == kv.num_usable
