"""Loads from stores outside the pool, on a worker that checks each KV slot."""

from __future__ import annotations

import pytest
from support.data_plane import answer, make_feature_run, tiers_of
from support.simulate import make_request

from engine.kv_transfer.tiers import MAX_SECONDS, NOWHERE
from policylab.verify.tiers import FakeCopies


def request_of(name, length=60, num_output=4):
    return make_request(name, [ord(name[0])] * length, num_output)


def stored(kind="plain", *names, num_blocks=10, **options):
    """A run in whose stores, and not in its pool, are the blocks of prompts that begin like these
    names."""
    stores = FakeCopies([kind], 20, 1)
    run = make_feature_run(
        resources=[tiers_of(stores)], stores=stores, num_blocks=num_blocks, **options
    )
    for each in (*names, "zz"):  # the last one takes all blocks
        run.add(request_of(f"{each} before", 60 if each in names else 16 * (num_blocks - 1) - 4))
        run.drain()
    run.plans.clear()
    return run, stores


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("depth", [1, 2])
def test_others_run_while_a_request_waits_for_its_blocks(depth):
    run, stores = stored("slow", "a", num_blocks=12, depth=depth)
    run.add(request := request_of("a"))
    run.add(other := request_of("b", 20))
    run.step()
    assert run.scheduler.get_request_counts() == (1, 0, 1) and run.plans[0] == {"b": 20}
    run.wait()
    assert next(plan["a"] for plan in run.plans if "a" in plan) == 60 - 48
    assert run.outputs["a"] == answer(request) and run.outputs["b"] == answer(other)
    assert stores.num_loaded == 3


@pytest.mark.behaviour(97)
def test_a_wait_for_blocks_has_its_own_cause():
    clock = [0.0]
    run, _ = stored("slow", "a", clock=lambda: clock[0])
    run.add(request_of("a"))
    while "a" not in run.finished:
        run.step()
        clock[0] += 1.0
    waits = run.ends["a"].waits
    assert waits.keys() <= {"kv load", "next step"} and waits["kv load"] >= 3


@pytest.mark.behaviour(97)
def test_blocks_that_do_not_come_are_computed():
    run, stores = stored("lossy", "a")
    run.add(request := request_of("a"))
    run.wait()
    assert next(plan["a"] for plan in run.plans if "a" in plan) == 60 - 32
    assert run.outputs["a"] == answer(request) and stores.num_loaded == 2


@pytest.mark.behaviour(97)
def test_a_request_that_is_woken_while_its_blocks_are_loaded_reads_none_of_them():
    run, _ = stored("slow", "a")
    run.add(request := request_of("a"))
    run.step()
    run.scheduler.wake("a")
    run.wait()
    assert run.plans[1]["a"] == 60 and run.outputs["a"] == answer(request)


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("is_aborted", [False, True])
def test_equal_prompts_are_loaded_once(is_aborted):
    run, stores = stored("slow", "a")
    requests = [request_of("a"), request_of("a too"), request_of("a as well", 50)]
    for each in requests:
        run.add(each)
    run.step()
    assert run.scheduler.get_request_counts() == (0, 0, 3)
    if is_aborted:  # others wait for what was begun for it
        run.scheduler.finish_requests("a")
        run.finished["a"] = ("abort", None)
    run.wait()
    for each in requests[is_aborted:]:
        assert run.outputs[each.request_id] == answer(each)
    assert stores.num_loaded == 3


@pytest.mark.behaviour(97)
def test_a_load_without_its_first_request_keeps_others_no_longer_than_the_limit():
    clock = [0.0]
    run, stores = stored("slow", "a", num_blocks=14, clock=lambda: clock[0])
    stores.stores[0].kind = "dead"
    run.add(request_of("a"))
    run.add(other := request_of("a too"))
    run.step()
    run.scheduler.finish_requests("a")
    run.finished["a"] = ("abort", None)
    for _ in range(4):  # the other tries once to load for itself
        clock[0] += MAX_SECONDS + 1
        run.step()
    assert any("a too" in plan for plan in run.plans)
    run.wait()
    assert run.outputs["a too"] == answer(other)


@pytest.mark.behaviour(97)
def test_what_another_load_does_not_bring_is_loaded_for_the_request_itself():
    run, stores = stored("slow", "a")
    requests = [request_of("a", 40), request_of("a too")]  # two blocks, and three
    for each in requests:
        run.add(each)
    run.wait()
    for each in requests:
        assert run.outputs[each.request_id] == answer(each)
    assert stores.num_loaded == 3
    assert next(plan["a too"] for plan in run.plans if "a too" in plan) == 60 - 48


@pytest.mark.behaviour(98)
def test_blocks_are_stored_before_others_write_to_them():
    """The next step, in which they are copied, computes another request in the same blocks."""
    run, stores = stored("plain", "a")
    assert len(stores.stored) >= 3
    run.add(again := request_of("a"))
    run.wait()
    assert run.outputs["a"] == answer(again) and stores.num_loaded == 3


@pytest.mark.behaviour(99)
def test_a_second_load_that_does_not_fit_waits_for_the_first():
    run, stores = stored("slow", "a", "b", num_blocks=7)
    requests = [request_of("a"), request_of("b")]
    for each in requests:
        run.add(each)
    run.step()
    assert run.scheduler.get_request_counts() == (0, 1, 1)
    run.wait()
    for each in requests:
        assert run.outputs[each.request_id] == answer(each)
    assert stores.num_loaded >= 6


@pytest.mark.behaviour(99)
def test_a_load_waits_for_those_that_run():
    run, stores = stored("plain", "a", num_blocks=8)
    run.add(first := request_of("b", 80, 8))
    run.step()
    run.add(second := request_of("a"))
    run.step()
    assert run.scheduler.get_request_counts() == (1, 1, 0) and not stores.num_loaded
    run.wait()
    assert run.outputs["b"] == answer(first) and run.outputs["a"] == answer(second)


@pytest.mark.behaviour(100)
def test_blocks_of_an_aborted_load_are_free_when_it_is_over():
    run, _ = stored("slow", "a")
    run.add(request_of("a"))
    run.step()
    kv = run.scheduler.kv
    run.scheduler.finish_requests("a")
    assert kv.num_free == kv.num_usable - 3
    run.finished["a"] = ("abort", None)
    run.wait()
    assert kv.num_free == kv.num_usable


def test_what_no_store_has_is_computed_at_once():
    run, stores = stored("plain")
    assert stores.find([b"x"]) == [NOWHERE]
    run.add(request := request_of("a"))
    run.step()
    assert run.plans[0] == {"a": 60}
    run.wait()
    assert run.outputs["a"] == answer(request)


def test_counters_are_of_what_stores_had_and_supplied():
    run, _ = stored("lossy", "a")
    before = run.scheduler.make_stats().counters
    run.add(request_of("a"))
    run.add(request_of("b"))
    run.wait()
    after = run.scheduler.make_stats().counters
    grown = {
        name.removeprefix("kv load."): num - before.get(name, 0) for name, num in after.items()
    }
    assert grown["lossy.hits"] == 3 and grown["misses"] == 3
    assert grown["lossy.loads"] == 1 and grown["lossy.blocks_loaded"] == 2
    assert grown["lossy.bytes_loaded"] == 2 and grown["blocks_failed"] == 1


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("name", ["do_remote_prefill", "do_remote_decode"])
def test_other_engines_have_part_only_where_the_connector_is_set(name):
    params = {name: True, "remote_host": "127.0.0.1", "remote_port": 14579}
    objection = tiers_of(FakeCopies(["plain"], 20, 1)).objection
    assert "kv_connector 'peers'" in objection(make_request("a", [1], kv_transfer_params=params))
    assert objection(make_request("a", [1], kv_transfer_params={name: False})) is None
