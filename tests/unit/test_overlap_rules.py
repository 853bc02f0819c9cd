"""The rules of steps in flight, one test each."""

from __future__ import annotations

import pytest
from support.simulate import expected, make_request, make_run

from engine.messages.params import SamplingParams

PROMPT = list(range(100, 140))


def test_rule_1_a_preempted_request_is_not_offered_while_results_are_in_flight():
    run = make_run(num_blocks=11, block_size=16, caching=False, depth=3)
    run.add(make_request("a", [1] * 80, 2))
    run.add(make_request("b", [2] * 80, 4))
    run.launch()
    run.launch()
    assert not run.launch() or "b" not in run.plans[-1]
    run.drain()
    assert run.outputs["b"] == expected([2] * 80, 4)


def test_rule_2_a_slot_is_reused_while_a_step_of_its_old_request_is_in_flight():
    run = make_run(max_num_seqs=1, depth=2)
    run.add(make_request("a", PROMPT, 50))
    run.add(make_request("b", PROMPT[:20], 3))
    run.launch()
    run.launch()
    (slot,) = [req.slot for req in run.scheduler.roster.running]
    row = run.scheduler.roster.by_id["a"].row
    run.scheduler.finish_requests("a")
    run.launch()
    other = run.scheduler.roster.by_id["b"]
    assert other.slot == slot and other.row != row
    run.drain()
    assert run.outputs["a"] == []
    assert run.outputs["b"] == expected(PROMPT[:20], 3)


def test_rule_4_holders_make_room_when_nobody_can_go_on():
    """Two prompts half computed fill the pool: the lower one gives way, nobody starves."""
    run = make_run(num_blocks=9, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    for name in "abcd":
        run.add(make_request(name, [ord(name)] * 20, 9))
    run.drain()
    for name in "abcd":
        assert run.outputs[name] == expected([ord(name)] * 20, 9)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rule_6_stopping_is_seen_late_and_overshoot_is_not_published(depth):
    tokens = expected(PROMPT, 12)
    run = make_run(depth=depth, block_size=4)
    run.add(make_request("a", PROMPT, 50, eos_token_ids=[tokens[8]]))
    run.drain()
    assert run.outputs["a"] == tokens[:9]
    assert run.finished["a"] == ("stop", None)
    # All that may be found afterwards are blocks of tokens that were known and written.
    again = make_request("b", PROMPT + tokens, 1)
    run.add(again)
    req = run.scheduler.roster.by_id["b"]
    assert run.scheduler.kv.lookup(req).num_tokens <= len(PROMPT) + 9 - 1
    run.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_of_the_user_is_its_own_reason(depth):
    tokens = expected(PROMPT, 6)
    run = make_run(depth=depth)
    params = SamplingParams(max_tokens=20, stop_token_ids=[tokens[3]])
    run.add(make_request("a", PROMPT, 20, params=params, eos_token_ids=[5000, 5001]))
    run.drain()
    assert run.outputs["a"] == tokens[:4]
    assert run.finished["a"] == ("stop", tokens[3])
