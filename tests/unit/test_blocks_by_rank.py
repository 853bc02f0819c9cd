"""Blocks go by rank: no request lacks them while one that it outranks computes tokens.

Blocks have 16 tokens; a pool of n blocks has n - 1 usable ones.
"""

from __future__ import annotations

import pytest
from support.simulate import expected, make_request, make_run

from engine.sched import Admission, Resource
from engine.sched.policies import FCFS, Priority


def steps_to_first_token(run, name):
    """Steps until the request has its first token, and how many of them left it out."""
    before = len(run.plans)
    while not run.outputs[name] and len(run.plans) < before + 100:
        run.step()
    plans = run.plans[before:]
    return len(plans), sum(name not in plan for plan in plans)


def test_an_urgent_prompt_does_not_wait_for_decodes_that_it_outranks():
    """192 tokens in pieces of 16 took 59 steps, in 47 of which the prompt got nothing: decodes were
    offered their tokens first, took every block that fell free, and were no victims any more."""
    run = make_run(num_blocks=15, caching=False, policy="priority", max_num_batched_tokens=18)
    for name in "ab":
        run.add(make_request(name, [ord(name)] * 8, 100, priority=9))
    run.step()
    run.add(make_request("urgent", [5] * 192, 4))
    num_steps, num_without = steps_to_first_token(run, "urgent")
    assert num_steps <= 14 and not num_without
    run.drain()
    assert run.outputs["a"] == expected([ord("a")] * 8, 100)


def test_an_early_prompt_in_pieces_does_not_wait_for_later_ones():
    """The same in order of arrival, with a cap on the pieces."""
    run = make_run(
        num_blocks=19, caching=False, max_num_batched_tokens=64, long_prefill_token_threshold=16
    )
    run.add(make_request("early", [5] * 208, 4))
    run.launch()  # alone it is not capped: 64 tokens
    for index in range(5):
        run.add(make_request(str(index), [index] * 15, 100))
    run.settle()
    num_steps, num_without = steps_to_first_token(run, "early")
    assert num_steps <= 10 and not num_without
    run.drain()
    assert run.outputs["early"] == expected([5] * 208, 4)


class AdmitsAll(FCFS):
    """Lets everybody start whose first piece fits."""

    def admit(self, req, view):
        return Admission.YES


def test_an_own_admit_does_not_give_away_what_a_prompt_was_promised():
    run = make_run(
        num_blocks=15,
        caching=False,
        policy=AdmitsAll(),
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32,
    )
    run.add(make_request("early", [5] * 208, 4))
    for index in range(9):
        run.add(make_request(str(index), [index] * 8, 30))
    num_steps, num_without = steps_to_first_token(run, "early")
    assert num_steps <= 7 and not num_without
    run.drain()


def test_the_last_by_rank_takes_the_blocks_there_are():
    """A piece that does not fit is cut, not left out."""
    run = make_run(num_blocks=9, caching=False, policy=AdmitsAll(), max_num_batched_tokens=80)
    run.add(make_request("first", [1] * 16, 40))
    run.add(make_request("last", [2] * 110, 2))
    for _ in range(2):
        run.step()
    assert run.plans == [{"first": 16, "last": 64}, {"first": 1, "last": 32}]
    run.drain()


def test_a_prompt_that_goes_first_leaves_its_token_to_each_decode():
    run = make_run(num_blocks=15, caching=False, policy="priority", max_num_batched_tokens=18)
    for name in "ab":
        run.add(make_request(name, [ord(name)] * 8, 100, priority=9))
    run.step()
    run.add(make_request("urgent", [5] * 192, 4))
    run.step()
    assert run.plans[-1] == {"a": 1, "b": 1, "urgent": 16}


class Guesses(Resource):
    """Three drafts for each decode."""

    def extra(self, req, step):
        return 3


def test_drafts_take_no_block_that_another_request_needs():
    """If drafts came first, a request that needs a block would preempt another one."""
    run = make_run(num_blocks=5, caching=False, resources=[Guesses()])
    run.num_drafts = 3
    run.add(make_request("a", [1] * 15, 6))
    run.add(make_request("b", [2] * 16, 6))
    run.add(make_request("c", [3] * 9, 3))
    run.step()
    run.step()
    assert run.scheduler.settler.counters.num_preemptions == 0
    assert run.plans[-1]["a"] == 1 and run.plans[-1]["b"] >= 1


@pytest.mark.parametrize("policy", [Priority(), Priority(preempt_for_waiting=True), "fcfs"])
@pytest.mark.parametrize("depth", [1, 2])
def test_contested_blocks_change_no_token(policy, depth):
    run = make_run(
        num_blocks=15, caching=False, policy=policy, max_num_batched_tokens=18, depth=depth
    )
    lengths = {"a": 8, "b": 60, "c": 120, "d": 3}
    for index, (name, length) in enumerate(lengths.items()):
        run.add(make_request(name, [index] * length, 40, priority=3 - index))
        run.step()
    run.drain()
    for index, (name, length) in enumerate(lengths.items()):
        assert run.outputs[name] == expected([index] * length, 40)
