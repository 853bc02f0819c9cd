"""Numbered behaviours of the prefix cache, and of the core as its client sees it.

Blocks have 16 tokens unless said; a pool of n blocks has n - 1 usable ones.
"""

from __future__ import annotations

import pytest
from support.fakes import FakeDecided
from support.holders import fill, holder
from support.simulate import expected, make_request, make_run, make_scheduler

from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.messages.params import SamplingParams
from policylab.verify.fake import CountingWorker

ALONE = [7] * 10


def add_all(run, lengths, max_tokens=16):
    """One request for each length; their tokens have nothing in common."""
    for index, length in enumerate(lengths):
        run.add(make_request(str(index), [index + 1] * length, max_tokens))


def tokens(run):
    """Tokens by request id, of the steps that computed any."""
    return [plan for plan in run.plans if plan]


SHARED = list(range(48))


def two_sharing():
    kv = make_scheduler(num_blocks=11).kv
    first, second = holder(0, [*SHARED, *[1] * 7]), holder(1, [*SHARED, *[2] * 5])
    fill(kv, first)
    return kv, first, second


@pytest.mark.behaviour(52, 53)
def test_a_second_prompt_adopts_what_it_shares():
    kv, first, second = two_sharing()
    hashes = [kv.cache.hash_of(block) for block in kv.held(first)]
    assert kv.held(first) == [1, 2, 3, 4]
    assert None not in hashes[:3] and len(set(hashes[:3])) == 3 and hashes[3] is None
    assert kv.lookup(second).num_tokens == 48
    assert fill(kv, second) == [1, 2, 3, 5]
    assert kv.pool.num_refs[1:6] == [2, 2, 2, 1, 1]


@pytest.mark.behaviour(54, 55)
def test_order_of_eviction():
    kv, first, second = two_sharing()
    fill(kv, second)
    kv.finish(first)
    kv.finish(second)
    order = [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert kv.pool.free_order() == order
    third = holder(2, [9] * 16 * 9)
    assert kv.reserve(third, 16 * 9)
    assert kv.held(third) == order[:9]
    assert [kv.cache.hash_of(block) is None for block in (3, 2, 1)] == [True, True, False]


@pytest.mark.behaviour(56)
def test_the_last_token_is_always_computed():
    run = make_run()
    run.add(make_request("a", [1] * 32, 1))
    run.drain()
    run.add(make_request("b", [1] * 32, 1))
    run.step()
    assert run.plans[-1] == {"b": 16}


@pytest.mark.behaviour(57)
def test_prompt_logprobs_fill_the_cache_but_do_not_read_it():
    run = make_run()
    for name, params in [("a", SamplingParams(prompt_logprobs=1)), ("b", SamplingParams())]:
        run.add(make_request("fill" + name, [ord(name)] * 40, 1, params=params))
        run.drain()
        run.add(make_request(name, [ord(name)] * 40, 1, params=params))
        run.drain()
    assert tokens(run) == [{"filla": 40}, {"a": 40}, {"fillb": 40}, {"b": 8}]
    run.add(make_request("reader", [ord("a")] * 40, 1))
    run.step()
    assert run.plans[-1] == {"reader": 8}


@pytest.mark.behaviour(58)
def test_a_decode_takes_a_block_when_it_crosses_into_it():
    run = make_run()
    run.add(make_request("a", [1] * 30, 10))
    req = run.scheduler.roster.by_id["a"]
    held = []
    for _ in range(4):
        run.step()
        held.append(len(run.scheduler.kv.held(req)))
    assert held == [2, 2, 2, 3]
    assert run.scheduler.kv.cache.hash_of(run.scheduler.kv.held(req)[1]) is not None


@pytest.mark.behaviour(62)
def test_a_failed_reservation_changes_nothing():
    kv, _, second = two_sharing()
    second.tokens.extend([3] * 200)
    before = (kv.pool.free_order(), list(kv.pool.num_refs), kv.cache.version)
    assert not kv.fits(second, len(second.tokens))
    assert not kv.reserve(second, len(second.tokens))
    assert (kv.pool.free_order(), kv.pool.num_refs, kv.cache.version) == before
    assert kv.held(second) == []


@pytest.mark.behaviour(63)
def test_adopted_blocks_are_not_taken_by_the_same_reservation():
    kv, first, second = two_sharing()
    kv.finish(first)
    second.tokens.extend([3] * (160 - len(second.tokens)))
    assert kv.reserve(second, 160)  # all ten blocks
    assert kv.held(second)[:3] == [1, 2, 3] and sorted(kv.held(second)) == list(range(1, 11))


@pytest.mark.behaviour(65)
def test_a_reset_is_refused_while_blocks_are_held():
    run = make_run()
    run.add(make_request("a", [1] * 40, 2))
    run.step()
    version = run.scheduler.kv.cache.version
    assert not run.scheduler.reset_prefix_cache()
    assert run.scheduler.kv.cache.version == version
    run.drain()
    assert run.scheduler.make_stats().num_cache_resets == 0
    assert run.scheduler.reset_prefix_cache()
    assert run.scheduler.make_stats().num_cache_resets == 1
    run.add(make_request("b", [1] * 40, 1))
    run.step()
    assert run.plans[-1] == {"b": 40}


@pytest.mark.behaviour(66)
def test_without_caching_nothing_hits_and_nothing_is_counted():
    run = make_run(caching=False)
    for name in "ab":
        run.add(make_request(name, [1] * 40, 1))
        run.drain()
    stats = run.scheduler.make_stats()
    assert tokens(run) == [{"a": 40}, {"b": 40}]
    assert (stats.prefix_queries, stats.prefix_hits) == (0, 0)


@pytest.mark.behaviour(71)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_turn_finds_the_first(depth):
    run = make_run(depth=depth)
    turn = [3] * 40
    run.add(make_request("a", turn, 30))
    run.drain()
    run.add(make_request("b", [*turn, *run.outputs["a"], *[4] * 20], 1))
    run.launch()
    assert run.plans[-1] == {"b": 90 - 69 // 16 * 16}


@pytest.mark.behaviour(72)
def test_twins_in_one_step_share_what_the_first_computes():
    run = make_run()
    for name in "ab":
        run.add(make_request(name, list(range(100)), 3))
    run.launch()
    assert run.plans == [{"a": 100, "b": 4}]


# -- the core and its client


def core_and_client():
    core = EngineCore(make_scheduler(), CountingWorker())
    return core, InprocClient(core, FakeDecided())


@pytest.mark.behaviour(101)
def test_a_core_has_work_until_the_worker_knows_of_the_end():
    core, client = core_and_client()
    client.add(make_request("a", ALONE))
    assert core.scheduler.get_request_counts() == (0, 1, 0)
    client.step()
    assert core.scheduler.get_request_counts() == (1, 0, 0)
    client.abort(["a"])
    assert core.scheduler.get_request_counts() == (0, 0, 0)
    assert core.has_work
    (out,) = client.step()
    assert [(out.request_ids[end.index], end.reason) for end in out.finished] == [("a", "abort")]
    assert not core.has_work


@pytest.mark.behaviour(102)
def test_an_abort_stops_one_and_unknown_ids_do_nothing():
    _, client = core_and_client()
    for name in "abc":
        client.add(make_request(name, ALONE, 3))
    client.abort(["b", "nobody", "b"])
    (out,) = client.step()
    assert out.request_ids == ["a", "c", "b"] and out.counts == [1, 1, 0]
    assert [(end.index, end.reason) for end in out.finished] == [(2, "abort")]
    client.step()
    client.step()
    client.abort(["a"])
    assert not client.has_unfinished() and client.step() == []


@pytest.mark.behaviour(103)
def test_an_id_is_free_again_only_after_its_end():
    _, client = core_and_client()
    client.add(make_request("a", ALONE, 1))
    with pytest.raises(ValueError, match="'a' is in use"):
        client.add(make_request("a", ALONE, 1))
    assert client.num_unfinished() == 1
    for _ in range(2):
        (out,) = client.step()
        assert [end.reason for end in out.finished] == ["length"]
        client.add(make_request("a", ALONE, 1))


@pytest.mark.behaviour(113)
def test_an_abort_during_the_last_step_wins():
    run = make_run(depth=2)
    add_all(run, [10, 10], 1)
    run.launch()
    run.scheduler.finish_requests("0")
    run.finished["0"] = ("abort", None)  # said by the front end; the core sends nothing more
    run.drain()
    assert run.outputs["0"] == [] and run.outputs["1"] == expected([2] * 10, 1)


@pytest.mark.behaviour(128)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_any_depth_gives_the_same_tokens_and_no_step_too_many(max_tokens):
    outputs = []
    for depth in (1, 2, 3):
        run = make_run(depth=depth)
        add_all(run, [20, 30], max_tokens)
        run.drain()
        assert run.num_tokens == 20 + 30 + 2 * (max_tokens - 1)
        outputs.append(run.outputs)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.behaviour(71)
def test_a_block_is_found_as_soon_as_its_last_token_is_known():
    """With two steps in flight the one that writes it is not settled yet, nor is its request given
    tokens again first: steps are computed in order."""
    run = make_run(depth=2, block_size=4)
    run.add(make_request("a", [1] * 6, 20))
    run.launch()
    run.launch()  # computes the first output, position 6
    run.settle()
    run.launch()  # computes the second one, position 7, the last of its block
    run.settle()
    known = [1] * 6 + run.outputs["a"]
    assert len(known) == 8 and len(run.flight) == 1
    run.add(make_request("b", [*known, 9], 3))
    waiting = run.scheduler.roster.by_id["b"]
    assert run.scheduler.kv.cached_prefix(waiting) == 8
    run.drain()
    assert run.outputs["b"] == expected([*known, 9], 3)


@pytest.mark.behaviour(29)
def test_the_last_running_request_that_lacks_a_block_keeps_its_blocks_and_waits():
    run = make_run(num_blocks=5, caching=False)
    run.add(make_request("first", [1] * 20, 10))
    run.add(make_request("last", [2] * 30, 10))
    while "first" not in run.finished:
        run.step()
    last = run.scheduler.roster.by_id["last"]
    assert [sorted(plan) for plan in run.plans] == [["first", "last"]] * 3 + [["first"]] * 7
    assert last.num_preempted == 0 and len(run.scheduler.kv.held(last)) == 2
    run.drain()
    assert run.outputs["last"] == expected([2] * 30, 10)
