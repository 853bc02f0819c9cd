"""Policies that shape a step: how many tokens, of prompts or of decodes, and for whom."""

from __future__ import annotations

import pytest
from support.timed import timed_run

from engine.errors import RequestError
from engine.sched.policies.blendserve import BlendServe
from engine.sched.policies.conserve import ConServe
from engine.sched.policies.early_rejection import EarlyRejection
from engine.sched.policies.fcfs import FCFS
from engine.sched.policies.prefill_first import PrefillFirst
from engine.sched.policies.qoserve import QoServe
from engine.sched.policies.sarathi import Sarathi
from engine.sched.policies.slai import SLAI

# Before any step was measured the cost model says: 5 ms a step and 20 us a token.


def test_sarathi_decodes_first_within_its_step_size():
    run = timed_run(Sarathi(step_tokens=16))
    run.ask("a", 8, 40)
    run.ask("b", 8, 40)
    run.steps(2)
    run.ask("long", 100, 2)
    for plan in run.steps(7):
        assert plan == {"a": 1, "b": 1, "long": 14}
    assert run.steps(1) == [{"a": 1, "b": 1, "long": 2}]
    run.drain()


def test_sarathi_runs_no_more_requests_than_a_step_has_tokens():
    run = timed_run(Sarathi(step_tokens=4))
    for index in range(12):
        run.ask(f"r{index}", 3, 6)
    run.drain()
    assert max(sum(plan.values()) for plan in run.plans) == 4
    assert max(len(plan) for plan in run.plans) <= 4


def test_prefill_first_pauses_decodes_while_prompts_run():
    run = timed_run(PrefillFirst(), max_num_batched_tokens=16)
    run.ask("a", 8, 6)
    run.ask("b", 8, 6)
    assert run.steps(2)[1] == {"a": 1, "b": 1}
    run.ask("long", 40, 4)
    held = list(run.scheduler.kv.held(run.request("a")))
    assert run.steps(3) == [{"long": 16}, {"long": 16}, {"long": 8}]
    assert run.scheduler.kv.held(run.request("a")) == held
    assert run.steps(1) == [{"a": 1, "b": 1, "long": 1}]
    run.drain()
    assert run.num_preemptions == 0


def test_prefill_first_decodes_when_no_prompt_fits():
    run = timed_run(PrefillFirst(), max_num_seqs=1)
    run.ask("a", 8, 6)
    run.steps(1)
    run.ask("b", 8, 2)
    assert run.steps(5) == [{"a": 1}] * 5
    run.drain()


def test_qoserve_sizes_a_step_by_the_slack_of_its_decodes():
    policy = QoServe(ttft=1.0, tbt=0.02, min_chunk=8)
    run = timed_run(policy, step_seconds=0.0, max_num_batched_tokens=2048)
    cost = run.scheduler.view.cost
    run.ask("a", 8, 400)
    run.steps(1)
    run.ask("long", 1900, 2)
    run.clock.now = 1.0  # the second token of "a" is due in 20 ms
    (plan,) = run.steps(1)
    assert plan["a"] == 1
    assert 0.015 < cost.prefill_seconds(plan["long"]) <= 0.02
    run.clock.now = 1.02  # and the third at 1.04
    (plan,) = run.steps(1)
    assert plan["long"] < 1000
    run.scheduler.finish_requests("a")
    assert run.steps(1)[0]["long"] > 200, "nobody decodes: the whole step is free"
    run.drain()


def test_qoserve_serves_who_can_still_make_it_before_who_cannot():
    run = timed_run(QoServe(ttft=2.0), max_num_seqs=1, step_seconds=0.01)
    run.ask("busy", 8, 10)
    run.steps(1)
    run.ask("late", 64, hints={"ttft": 0.001})
    run.ask("loose", 64, hints={"ttft": 9.0})
    run.ask("tight", 64, hints={"ttft": 1.0})
    assert run.order() == ["busy", "tight", "loose", "late"]


def test_qoserve_weighs_work_against_deadlines():
    for alpha, first in ((0.0, "large"), (50.0, "small")):
        run = timed_run(QoServe(alpha=alpha), max_num_seqs=1, step_seconds=0.001)
        run.ask("large", 1500, hints={"ttft": 2.0})
        run.ask("small", 10, hints={"ttft": 2.5})
        assert run.order()[0] == first


def test_slai_pauses_decodes_that_are_not_due():
    run = timed_run(SLAI(tbt=1.0, guard=0.25), step_seconds=0.1, max_num_batched_tokens=16)
    run.ask("a", 8, 6)
    run.steps(2)  # its last token was asked for at 0.2 s, so it is due from 0.95 s on
    run.ask("long", 200, 2)
    held = list(run.scheduler.kv.held(run.request("a")))
    assert run.steps(7) == [{"long": 16}] * 7
    assert run.scheduler.kv.held(run.request("a")) == held
    assert run.steps(1) == [{"a": 1, "long": 15}]
    assert run.steps(1) == [{"long": 16}]
    run.drain()
    assert run.num_preemptions == 0


def test_slai_lets_everybody_decode_when_no_prompt_can_run():
    run = timed_run(SLAI(tbt=100.0, guard=0.1), max_num_seqs=2)
    run.ask("a", 8, 6)
    run.ask("b", 8, 6)
    run.steps(1)
    run.ask("c", 8, 6)
    assert run.steps(5) == [{"a": 1, "b": 1}] * 5
    run.drain()


def test_slai_takes_the_shortest_prompt_but_nobody_waits_for_ever():
    run = timed_run(SLAI(max_wait=20.0), max_num_seqs=1)
    run.ask("busy", 8, 20)
    run.ask("old", 64)
    run.steps(10)
    run.ask("medium", 32)
    run.ask("short", 8)
    assert run.order() == ["busy", "old", "short", "medium"]


def test_conserve_gives_offline_requests_the_time_online_ones_leave():
    run = timed_run(ConServe(tbt=0.01), step_seconds=0.0)
    cost = run.scheduler.view.cost
    run.ask("online", 8, 10)
    run.steps(1)
    run.ask("offline", 1500, 2, hints={"offline": True})
    (plan,) = run.steps(1)
    assert plan["online"] == 1
    assert 0.009 < cost.prefill_seconds(plan["offline"]) <= 0.01
    run.scheduler.finish_requests("online")
    assert run.steps(1) == [{"offline": 1024}]
    run.drain()


def test_conserve_evicts_offline_requests_first_and_for_waiting_online_ones():
    run = timed_run(ConServe(tbt=9.0), num_blocks=9, block_size=4, max_num_seqs=8)
    run.ask("online", 8, 20)
    run.ask("offline", 12, 16, hints={"offline": True})
    run.steps(2)
    run.ask("urgent", 12, 4)
    run.steps(1)
    assert run.request("offline").num_preempted == 1
    assert run.started == ["online", "offline", "urgent"]
    run.drain()
    assert run.ended[-1] == "offline"


def test_early_rejection_refuses_what_would_come_too_late():
    run = timed_run(EarlyRejection(ttft=0.21), step_seconds=0.0, max_num_batched_tokens=64)
    for index in range(4):  # each takes 8 steps of 6.3 ms
        run.ask(f"r{index}", 500)
    with pytest.raises(RequestError, match=r"first token would take 0\.25 s, the limit is 0\.21 s"):
        run.ask("late", 500)
    run.ask("patient", 500, hints={"ttft": 1.0})
    with pytest.raises(RequestError, match=r"hints\['ttft'\] is 'soon', must be a finite number"):
        run.ask("odd", 8, hints={"ttft": "soon"})
    run.drain()
    assert sorted(run.ended) == ["patient", "r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("short_of", [{"max_num_seqs": 2}, {"num_blocks": 12, "block_size": 16}])
def test_early_rejection_foresees_that_seats_and_blocks_come_free_late(short_of):
    run = timed_run(EarlyRejection(ttft=0.1), step_seconds=0.0, **short_of)
    run.ask("known", 8, 40)
    run.drain()
    for index in range(2):
        run.ask(f"r{index}", 48, 40)
    run.step()
    # One of the two ends every 20 steps of 5 ms; its own prompt takes one step.
    with pytest.raises(RequestError, match="first token would take"):
        run.ask("late", 128, 40)
    run.ask("patient", 128, 40, hints={"ttft": 0.5})
    run.drain()
    assert sorted(run.ended) == ["known", "patient", "r0", "r1"]


def test_early_rejection_knows_what_is_cached():
    run = timed_run(EarlyRejection(ttft=0.06), step_seconds=0.0, max_num_batched_tokens=64)
    prompt = list(range(640))
    run.ask("first", prompt[:500])
    run.drain()
    run.ask("again", prompt)
    with pytest.raises(RequestError, match="first token would take"):
        run.ask("other", 640)
    run.drain()


def mixes(policy) -> list[float]:
    """Mean share of computed tokens in what runs, per step; all compute comes first."""
    run = timed_run(policy, max_num_seqs=8, max_num_batched_tokens=2048)
    for index in range(24):
        run.ask(f"compute{index}", 95, 5)
    for index in range(24):
        run.ask(f"memory{index}", 5, 95)
    seen = []
    for _ in range(20):
        run.step()
        shares = [0.95 if name.startswith("compute") else 0.05 for name in run.plans[-1]]
        seen.append(sum(shares) / len(shares))
    run.drain()
    return seen


def test_blendserve_keeps_what_runs_near_the_wanted_blend():
    blended, plain = mixes(BlendServe(blend=0.5)), mixes(FCFS())
    assert all(0.3 < mix < 0.7 for mix in blended), blended
    assert max(plain) > 0.9
    assert min(plain) < 0.1
