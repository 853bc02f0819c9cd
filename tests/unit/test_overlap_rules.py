"""The rules of steps in flight, one test each."""

from __future__ import annotations

import pytest
from support.simulate import expected, make_request, make_run

from engine.messages.params import SamplingParams

PROMPT = list(range(100, 140))


def test_rule_1_late_results_of_a_preempted_request_count():
    """Two prompts of 5 blocks in a pool of 10: the second makes room, its late token is kept."""
    run = make_run(num_blocks=11, block_size=16, caching=False, depth=2)
    run.add(make_request("a", [1] * 80, 20))
    run.add(make_request("b", [2] * 80, 20))
    assert run.launch()  # both prompts; one token of each is in flight
    assert run.launch()  # a needs a sixth block: b makes room
    assert run.plans[1] == {"a": 1}
    assert run.scheduler.settler.counters.num_preemptions == 1
    run.settle()
    assert len(run.outputs["b"]) == 1, "the token sampled before the preemption was dropped"
    run.drain()
    assert run.outputs["b"] == expected([2] * 80, 20)


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


def test_rule_3_twins_in_one_step_share_full_blocks():
    run = make_run()
    prompt = list(range(100))
    run.add(make_request("a", prompt, 2))
    run.add(make_request("b", prompt, 2))
    run.launch()
    assert run.plans[0] == {"a": 100, "b": 100 % 16}
    run.drain()
    assert run.outputs["a"] == run.outputs["b"] == expected(prompt, 2)


def test_rule_4_holders_make_room_when_nobody_can_go_on():
    """Two prompts half computed fill the pool: the lower one gives way, nobody starves."""
    run = make_run(num_blocks=9, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    for name in "abcd":
        run.add(make_request(name, [ord(name)] * 20, 9))
    run.drain()
    for name in "abcd":
        assert run.outputs[name] == expected([ord(name)] * 20, 9)


def test_rule_5_nothing_is_computed_behind_the_last_token():
    for depth in (1, 2, 3):
        for max_tokens in (1, 2, 3, 5):
            run = make_run(depth=depth)
            run.add(make_request("a", PROMPT, max_tokens))
            run.drain()
            assert run.num_tokens == len(PROMPT) + max_tokens - 1, (depth, max_tokens)


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


def test_rule_7_preempted_is_waiting_at_its_own_rank():
    run = make_run(num_blocks=11, block_size=16, caching=False, max_num_seqs=2)
    for name in "abc":
        run.add(make_request(name, [ord(name)] * 80, 20))
    run.step()
    run.step()
    b = run.scheduler.roster.by_id["b"]
    assert b.is_waiting and b.num_preempted == 1
    assert [req.request_id for req in run.scheduler.roster.waiting] == ["b", "c"]
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
