"""Numbered behaviours of the scheduler, each in a few lines: input and what must come of it.

Where the design is meant to differ from engines of the same kind, the test says so. Blocks have 16
tokens unless said; a pool of n blocks has n - 1 usable ones.
"""

from __future__ import annotations

import pytest
from support.simulate import expected, make_request, make_run, make_scheduler

from engine.errors import ConfigError, RequestError
from engine.messages.params import SamplingParams
from engine.sched.plugins.find import find_policy
from policylab.verify.fake import CountingWorker

ALONE = [7] * 10


def add_all(run, lengths, max_tokens=16, **fields):
    """One request for each length; their tokens have nothing in common."""
    for index, length in enumerate(lengths):
        run.add(make_request(str(index), [index + 1] * length, max_tokens, **fields))


def plans_of(run, count):
    """The next steps, each as request id -> tokens."""
    start = len(run.plans)
    for _ in range(count):
        run.step()
    return run.plans[start:]


# -- queue and budgets


@pytest.mark.behaviour(1, 2)
def test_requests_are_counted_as_they_come_and_go():
    scheduler = make_scheduler()
    for index in range(10):
        scheduler.add_request(make_request(str(index), ALONE))
        assert scheduler.get_request_counts() == (0, index + 1, 0)
    for index in range(10):
        assert [req.request_id for req in scheduler.finish_requests(str(index))] == [str(index)]
        assert scheduler.get_num_unfinished_requests() == 9 - index


@pytest.mark.behaviour(3)
def test_one_step_takes_ten_small_prompts_in_order():
    run = make_run()
    add_all(run, range(1, 11))
    run.launch()
    assert list(run.plans[0].items()) == [(str(i), i + 1) for i in range(10)]
    assert not run.scheduler.has_finished_requests()


@pytest.mark.behaviour(4)
def test_nothing_to_do_is_an_empty_plan():
    plan = make_scheduler().schedule()
    assert plan.is_empty and plan.num_tokens == 0 and not len(plan.rows)


@pytest.mark.behaviour(5)
def test_long_prompts_are_capped_while_others_compete():
    run = make_run(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add_all(run, [800, 800, 800])
    assert [sorted(plan.items()) for plan in plans_of(run, 3)] == [
        [("0", 400), ("1", 400), ("2", 224)],
        [("0", 400), ("1", 400), ("2", 224)],
        [("0", 1), ("1", 1), ("2", 352)],
    ]


@pytest.mark.behaviour(6, 7)
@pytest.mark.parametrize(("chunked", "first"), [(True, {"0": 800, "1": 224}), (False, {"0": 800})])
def test_nobody_passes_a_prompt_that_does_not_fit(chunked, first):
    run = make_run(
        max_num_batched_tokens=1024,
        max_model_len=1024,
        max_num_seqs=3,
        enable_chunked_prefill=chunked,
    )
    add_all(run, [800, 800, 10, 10])
    assert plans_of(run, 1) == [first]


@pytest.mark.behaviour(8)
def test_the_cap_is_ignored_for_a_lone_prompt():
    run = make_run(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add_all(run, [1500])
    assert plans_of(run, 2) == [{"0": 1024}, {"0": 476}]


@pytest.mark.behaviour(8)
def test_next_to_one_decode_the_cap_is_the_threshold():
    """It was half of the budget, the share of one of two."""
    run = make_run(max_num_batched_tokens=2048, long_prefill_token_threshold=256)
    add_all(run, [4])
    run.step()
    run.add(make_request("long", [9] * 1800))
    assert plans_of(run, 1) == [{"0": 1, "long": 256}]


@pytest.mark.behaviour(9)
@pytest.mark.parametrize(("adaptive", "share"), [(True, 512), (False, 100)])
def test_an_adaptive_cap_is_never_below_an_equal_share(adaptive, share):
    run = make_run(
        max_num_batched_tokens=1024,
        long_prefill_token_threshold=100,
        long_prefill_token_threshold_adaptive=adaptive,
    )
    add_all(run, [900, 900])
    assert plans_of(run, 1) == [{"0": share, "1": share}]


@pytest.mark.behaviour(10)
def test_one_seat_serves_one_after_the_other():
    run = make_run(max_num_seqs=1)
    add_all(run, [5, 5], 2)
    assert plans_of(run, 3) == [{"0": 5}, {"0": 1}, {"1": 5}]


@pytest.mark.behaviour(13)
def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="edf, fastserve, fcfs"):
        find_policy("lottery", {})


# -- progress and stopping


@pytest.mark.behaviour(14)
def test_counts_advance_before_the_result_is_known():
    run = make_run()
    add_all(run, [100])
    run.launch()
    req = run.scheduler.roster.by_id["0"]
    assert (req.num_computed, req.num_output, req.num_pending) == (100, 0, 1)


@pytest.mark.behaviour(16)
def test_end_of_text_stops_without_a_stop_reason():
    run = make_run()
    run.add(make_request("0", ALONE, 9, eos_token_ids=[expected(ALONE, 2)[1]]))
    run.step()
    run.step()
    assert run.finished == {"0": ("stop", None)}
    assert run.scheduler.get_num_unfinished_requests() == 0 and run.scheduler.has_requests()
    told, after = run.scheduler.schedule(), run.scheduler.schedule()
    assert (told.freed_slots, after.freed_slots, after.is_empty) == ([0], [], True)


@pytest.mark.behaviour(18, 21)
@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(2, 2048), (50, 12)])
def test_length_ends_at_max_tokens_or_max_model_len(max_tokens, max_model_len):
    run = make_run(max_model_len=max_model_len)
    run.add(make_request("0", ALONE, max_tokens))
    run.drain()
    assert run.outputs["0"] == expected(ALONE, 2)
    assert run.finished["0"] == ("length", None)


@pytest.mark.behaviour(19)
def test_ignored_end_of_text_goes_on():
    """Whoever ignores it has no end-of-text ids in the request."""
    run = make_run()
    run.add(make_request("0", ALONE, 5, params=SamplingParams(max_tokens=5, ignore_eos=True)))
    run.drain()
    assert run.outputs["0"] == expected(ALONE, 5)


@pytest.mark.behaviour(22)
@pytest.mark.parametrize("depth", [1, 2])
def test_only_those_who_stopped_are_removed(depth):
    run = make_run(depth=depth)
    for index in range(6):
        stops = [expected([index] * 8, 3)[2]] if index % 2 else []
        run.add(make_request(str(index), [index] * 8, 7, eos_token_ids=stops))
    run.drain()
    for index in range(6):
        assert run.outputs[str(index)] == expected([index] * 8, 3 if index % 2 else 7)


@pytest.mark.behaviour(23)
def test_a_prompt_chunk_brings_no_output():
    scheduler, worker = make_scheduler(max_num_batched_tokens=64), CountingWorker()
    scheduler.add_request(make_request("0", [1] * 100))
    plan = scheduler.schedule()
    assert scheduler.update_from_output(plan, worker.launch(plan)) == {}
    assert scheduler.roster.by_id["0"].num_pending == 0


@pytest.mark.behaviour(24)
@pytest.mark.parametrize("length", [0, 2048, 5000])
def test_impossible_lengths_never_enter(length):
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match=rf"{length} tokens.*2047"):
        scheduler.add_request(make_request("0", [1] * length))
    assert scheduler.get_num_unfinished_requests() == 0


@pytest.mark.behaviour(25)
def test_one_token_is_finished_by_the_prefill_step():
    run = make_run()
    add_all(run, [30], 1)
    run.step()
    assert run.finished == {"0": ("length", None)}


# -- preemption


def full_pool(depth=1, lengths=(80, 80)):
    """Two prompts of five blocks in a pool of ten."""
    run = make_run(num_blocks=11, caching=False, depth=depth)
    add_all(run, lengths, 20)
    return run


@pytest.mark.behaviour(26, 33)
def test_the_youngest_makes_room():
    """Preempted is not a status here: it waits, at its rank, and its preemptions are counted."""
    run = full_pool()
    add = make_request("2", [9] * 5)
    run.step()
    run.add(add)
    run.step()
    victim = run.scheduler.roster.by_id["1"]
    assert run.plans[1] == {"0": 1}
    assert victim.is_waiting and victim.num_preempted == 1 and victim.num_computed == 0
    assert [req.request_id for req in run.scheduler.roster.waiting] == ["1", "2"]
    assert run.scheduler.make_stats().num_preemptions == 1


@pytest.mark.behaviour(27)
def test_a_result_that_was_on_its_way_still_counts():
    run = full_pool(depth=2)
    run.launch()
    run.launch()
    assert run.plans[1] == {"0": 1}
    run.settle()
    assert run.outputs["1"] == expected([2] * 80, 1)


@pytest.mark.behaviour(28)
def test_nobody_is_admitted_in_a_step_that_preempts():
    run = full_pool()
    run.step()
    run.add(make_request("2", [9] * 5))  # would fit into what the preemption frees
    assert plans_of(run, 1) == [{"0": 1}]


@pytest.mark.behaviour(29)
def test_a_lone_request_that_cannot_grow_waits_and_tries_again():
    """It cannot happen to a request that is truly alone: such a one is refused when added."""
    run = make_run(num_blocks=5)
    with pytest.raises(RequestError, match=r"69 tokens and need 5 KV blocks.*only 4"):
        run.add(make_request("0", [1] * 60, 10))
    add_all(run, [60, 60], 4)
    run.drain()
    assert [run.outputs[str(i)] for i in range(2)] == [expected([i + 1] * 60, 4) for i in range(2)]


@pytest.mark.behaviour(31)
def test_a_resumed_request_computes_prompt_and_output_again():
    run = full_pool()
    run.step()
    run.step()
    run.scheduler.finish_requests("0")
    run.finished["0"] = ("abort", None)
    plan = run.scheduler.schedule()
    (seq,) = plan.new
    assert seq.request_id == "1" and seq.num_prompt == 80
    assert seq.token_ids == [2] * 80 + expected([2] * 80, 1)
    assert plan.counts.tolist() == [81]
    assert plan.block_indices.tolist() == list(range(6))


@pytest.mark.behaviour(32)
def test_lookups_are_counted_once_and_apart_after_a_preemption():
    run = make_run(num_blocks=11)
    add_all(run, [80, 80], 20)
    run.step()
    assert (run.scheduler.kv.counts.queries, run.scheduler.kv.counts.preempted_queries) == (160, 0)
    run.drain()
    counts = run.scheduler.kv.counts
    assert counts.queries == 160
    assert counts.preempted_queries > 80 and counts.preempted_hits > 0


# -- priority


@pytest.mark.behaviour(35, 36, 37, 41, 44, 45)
@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 0, 1], [0, 0, 0], "120"),
        ([1, 1, 1], [3, 1, 2], "120"),
        ([2, 1, 1, 0], [1, 3, 2, 4], "3210"),
        ([-3, 0, -1], [0, 0, 0], "021"),
        ([0, 0, 0], [5, 5, 5], "012"),
        ([3, 1, 2, 1, 0, 3, 0, 2], [0, 5, 1, 4, 7, 0, 6, 1], "64312705"),
    ],
)
def test_order_of_priorities(priorities, arrivals, order):
    """Ties are broken by number of arrival, never by id, and never by comparing requests."""
    run = make_run(policy="priority", max_num_seqs=1)
    for index, (priority, arrival) in enumerate(zip(priorities, arrivals, strict=True)):
        add = make_request(
            str(index), [index] * 4, 1, priority=priority, arrival_time=float(arrival)
        )
        run.add(add)
    run.drain()
    assert "".join(name for plan in run.plans for name in plan) == order


@pytest.mark.behaviour(38)
def test_the_least_urgent_makes_room():
    run = make_run(num_blocks=16, caching=False, policy="priority")
    for index, priority in enumerate([5, 0, 5]):
        run.add(make_request(str(index), [index] * 80, 4, priority=priority))
    run.step()
    run.step()  # everybody needs a sixth block
    assert run.plans[1].keys() == {"0", "1"}
    assert run.scheduler.roster.by_id["2"].num_preempted == 1


@pytest.mark.behaviour(39)
def test_with_room_for_all_nobody_is_preempted():
    run = make_run(policy="priority")
    for index, priority in enumerate([3, -1, 0]):
        run.add(make_request(str(index), [index] * 40, 20, priority=priority))
    run.drain()
    assert run.scheduler.settler.counters.num_preemptions == 0


@pytest.mark.behaviour(40)
def test_one_seat_goes_to_the_most_urgent():
    run = make_run(policy="priority", max_num_seqs=1)
    for index, priority in enumerate([3, 2, 0]):
        run.add(make_request(str(index), ALONE, 5, priority=priority))
    assert list(plans_of(run, 1)[0]) == ["2"]
    assert [req.request_id for req in run.scheduler.roster.waiting] == ["1", "0"]


@pytest.mark.behaviour(42)
def test_nobody_is_granted_and_evicted_in_one_step():
    """So a victim has nothing of this step to give back."""
    run = make_run(num_blocks=12, block_size=2, caching=False, policy="priority", max_num_seqs=4)
    for index in range(8):
        run.add(make_request(str(index), [index] * 4, 9, priority=-index))
    while run.step():
        evicted = {req.request_id for req in run.scheduler.view.step.preempted}
        assert run.flight or evicted.isdisjoint(run.plans[-1])
    assert run.scheduler.settler.counters.num_preemptions


@pytest.mark.behaviour(43)
def test_the_urgent_one_takes_the_blocks_of_the_other():
    run = make_run(num_blocks=5, caching=False, policy="priority")
    run.add(make_request("low", [1] * 30, 8, priority=1))
    run.step()
    run.add(make_request("urgent", [2] * 32, 8))
    assert plans_of(run, 2) == [{"low": 1, "urgent": 32}, {"urgent": 1}]
    low = run.scheduler.roster.by_id["low"]
    assert low.is_waiting and low.num_uncomputed == 30 + 2
    run.drain()
    assert run.outputs["low"] == expected([1] * 30, 8)
