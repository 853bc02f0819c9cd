"""Where the preferences of policies begin and end: exactly there, neither before nor after."""

from __future__ import annotations

import pytest
from support.timed import timed_run

from engine.errors import ConfigError
from engine.sched.plugins.find import find_policy
from engine.sched.policies import POLICIES
from engine.sched.policies.andes import Andes
from engine.sched.policies.blendserve import BlendServe
from engine.sched.policies.conserve import ConServe
from engine.sched.policies.dlpm import DLPM
from engine.sched.policies.early_rejection import EarlyRejection
from engine.sched.policies.edf import EDF
from engine.sched.policies.fastserve import FastServe
from engine.sched.policies.hrrn import HRRN
from engine.sched.policies.lpm import LPM
from engine.sched.policies.ltr import LTR
from engine.sched.policies.mc_sf import MCSF
from engine.sched.policies.past_future import PastFuture
from engine.sched.policies.plas import PLAS
from engine.sched.policies.prefill_first import PrefillFirst
from engine.sched.policies.priority import Priority
from engine.sched.policies.qoserve import QoServe
from engine.sched.policies.residual_sjf import ResidualSJF
from engine.sched.policies.slai import SLAI
from engine.sched.policies.trail import TRAIL


def queue_up(policy):
    """One runs; of those who wait one has done so for 20 s, one for less, one was evicted once.

    Their numbers of arrival are larger than any length. Returns the run, and their ranks.
    """
    run = timed_run(policy, max_num_seqs=1)
    run.ask("busy", 8, 30)
    run.steps(1)
    for index in range(450):
        run.ask(str(index), 8)
        run.scheduler.finish_requests(str(index))
    now = run.clock.now
    run.ask("short", 8)
    run.ask("nearly", 300, arrival_time=now - 19.5)
    run.ask("old", 300, arrival_time=now - 20.0)
    run.ask("evicted", 400)
    evicted = run.request("evicted")
    evicted.table.facts.num_preempted.at[evicted.row] = 1
    view = run.scheduler.view
    return run, {req.request_id: policy.rank(req, view) for req in view.unfinished}


@pytest.mark.parametrize("cls", [LPM, PLAS, ResidualSJF, MCSF, SLAI])
def test_whoever_had_tokens_goes_first_then_who_waited_long_enough(cls):
    run, ranks = queue_up(cls(max_wait=20.0))
    assert max(ranks["busy"], ranks["evicted"]) < ranks["old"]
    assert ranks["old"] < min(ranks["short"], ranks["nearly"])
    if cls in (ResidualSJF, SLAI):
        assert ranks["short"] < ranks["nearly"]
    run.drain()


@pytest.mark.parametrize("cls", [TRAIL, QoServe])
def test_whoever_waited_long_enough_goes_first(cls):
    run, ranks = queue_up(cls(max_wait=20.0))
    assert ranks["old"] < min(ranks["short"], ranks["nearly"], ranks["evicted"])
    run.drain()


def test_hrrn_lets_whoever_had_tokens_go_on():
    run, ranks = queue_up(HRRN())
    others = [ranks[name] for name in ("old", "nearly", "short")]
    assert max(ranks["busy"], ranks["evicted"]) < min(others)
    run.drain()


@pytest.mark.parametrize(("waited", "first"), [(19.5, "new"), (20.0, "old")])
@pytest.mark.parametrize("policy", [DLPM, BlendServe])
def test_the_oldest_is_next_from_max_wait_on(policy, waited, first):
    run = timed_run(policy(max_wait=20.0), max_num_seqs=2)
    known = list(range(32))
    run.ask("known", [*known, 0], 90)  # and what runs needs memory more than compute
    run.steps(2)
    run.ask("old", [7] * 16, 64, arrival_time=run.clock.now - waited, user="b")
    run.ask("new", [*known, 1, 2, *([3] * 300)], 2, user="a")
    assert run.scheduler.policy.next_waiting(run.scheduler.view).request_id == first
    run.drain()


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (Priority(preempt_for_waiting=True), {"priority": 3}),
        (EDF(), {"deadline": 50.0}),
        (EDF(), {}),
        (ConServe(tbt=9.0), {}),
        (ConServe(tbt=9.0), {"hints": {"offline": True}}),
        (FastServe(quantum=50.0), {}),
        (LTR(), {}),
        (TRAIL(), {}),
        (Andes(max_late=0.001), {}),  # both are late from the start
    ],
)
def test_equals_do_not_take_each_others_seats(policy, fields):
    run = timed_run(policy, max_num_seqs=1)
    run.ask("first", 8, 6, arrival_time=0.0, **fields)
    run.steps(2)
    run.ask("second", 8, 6, arrival_time=0.0, **fields)
    run.drain()
    assert run.ended == ["first", "second"] and run.num_preemptions == 0


def test_only_where_it_is_asked_for_do_priorities_evict():
    assert not Priority().waiting_may_preempt and EDF().waiting_may_preempt


@pytest.mark.parametrize(("spare", "num_first"), [(0, 2), (-1, 1)])
@pytest.mark.parametrize("policy", [MCSF(), PastFuture(reserve=0.0)])
def test_memory_is_used_to_the_last_block(policy, spare, num_first):
    """Two run together if the worst moment of both needs every block there is, and no more."""
    options = {"block_size": 4, "length_predictor": "oracle", "caching": False}
    wide = timed_run(policy, **options)
    for name in "ab":
        wide.ask(name, 10, 20, hints={"output_tokens": 20})
    reqs = [wide.request(name) for name in "ab"]
    needed = wide.scheduler.kv.peak(reqs, lambda req: 20)
    wide.drain()
    run = timed_run(policy, num_blocks=1 + needed + spare, **options)
    for name in "ab":
        run.ask(name, 10, 20, hints={"output_tokens": 20})
    run.drain()
    assert len(run.plans[0]) == num_first and run.num_preemptions == 0


def test_qoserve_counts_only_the_work_that_is_left():
    run = timed_run(QoServe(alpha=1000.0, ttft=50.0), max_num_seqs=1, step_seconds=0.01)
    known = list(range(640))
    run.ask("known", [*known, 1])
    run.drain()
    run.ask("medium", 400)
    run.ask("long but known", [*known, 2, 3])
    run.ask("short", 100)
    assert run.order()[1:] == ["long but known", "short", "medium"]


def test_qoserve_sees_when_somebody_becomes_late():
    """It was the most urgent when it came; by the time the seat is free it cannot make it."""
    run = timed_run(QoServe(max_wait=900.0), max_num_seqs=1)
    run.ask("busy", 8, 10)
    run.steps(1)
    run.ask("urgent", 64, hints={"ttft": 3.0})
    run.ask("patient", 64, hints={"ttft": 90.0})
    assert run.order() == ["busy", "patient", "urgent"]


@pytest.mark.parametrize(("length", "last"), [(18, {"b": 2}), (17, {"a": 1, "b": 1})])
def test_a_prompt_is_one_down_to_two_tokens(length, last):
    """One token is computed like a decode, whoever it belongs to."""
    run = timed_run(PrefillFirst(), max_num_batched_tokens=16)
    run.ask("a", 8, 9)
    run.steps(1)
    run.ask("b", length, 9)
    assert run.steps(3) == [{"b": 16}, last, {"a": 1, "b": 1}]
    run.drain()


def test_plas_charges_what_was_computed():
    policy = PLAS(output_price=8.0)
    run = timed_run(policy)
    known = list(range(64))
    run.ask("first", [*known, 1], 3, hints={"program": "p"})
    run.drain()
    assert policy.service == {"p": 65 + 8 * 3}
    run.ask("second", [*known, 2, 3], 5, hints={"program": "p"})
    run.drain()
    assert policy.service == {"p": 65 + 8 * 3 + 2 + 8 * 5}


def test_early_rejection_predicts_the_steps_that_are_ahead():
    policy = EarlyRejection()
    run = timed_run(policy, step_seconds=0.0, max_num_batched_tokens=64)
    run.ask("a", 8, 50)
    run.ask("b", 8, 50)
    run.steps(2)
    run.ask("waiting", 100)
    run.ask("new", 42)
    view = run.scheduler.view
    context = sum(req.num_computed for req in view.running)
    # Beside two decodes 62 tokens of prompts: two full steps, and 18 tokens in a third.
    full, last = (view.cost.step_seconds(3, size, context, context) for size in (64, 20))
    assert context == 18
    new = run.request("new")
    run.scheduler.roster.waiting.remove(new)  # as it is when the policy is asked
    assert policy.predicted_ttft(new, view) == pytest.approx(2 * full + last)
    run.scheduler.roster.waiting.add(new)
    run.drain()


@pytest.mark.parametrize("num_seats", [3, 12])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_whoever_runs_finds_a_victim_when_memory_is_short(name, num_seats):
    """No policy leaves it to the mechanism to make room: ``drain`` sees to that."""
    run = timed_run(POLICIES[name](), num_blocks=11, block_size=4, max_num_seqs=num_seats)
    for index in range(10):
        run.ask(str(index), 7, 25, deadline=90.0 - index)
        run.steps(2)
    run.drain()
    assert len(run.ended) == 10
    assert (run.num_preemptions > 0) == (name not in ("mc-sf", "past-future")), "those foresee it"


@pytest.mark.parametrize(("quantum", "second"), [(20.0, "b"), (20.5, "again")])
def test_credit_is_spent_when_nothing_is_left_of_it(quantum, second):
    run = timed_run(DLPM(quantum=quantum), max_num_seqs=1, block_size=4)
    run.ask("a", list(range(10)), 5, user="a")  # ten tokens of a prompt, five of output at two
    run.steps(1)
    run.ask("again", [*range(10), 1], 5, user="a")
    run.ask("b", 10, 5, user="b")
    assert run.order()[1] == second


def test_shares_are_from_nothing_to_all():
    for share in (0.0, 1.0):
        assert find_policy("blendserve", {"blend": share}).blend == share
    for share in (-0.01, 1.01, 2.0):
        with pytest.raises(ConfigError, match=f"blend is {share}, must be a number from 0 to 1"):
            find_policy("blendserve", {"blend": share})


def test_trail_calls_nobody_young_at_the_share_itself():
    run = timed_run(TRAIL(young=0.5), max_num_seqs=1, length_predictor="oracle")
    run.ask("a", 8, 10, hints={"output_tokens": 10})
    seen = []
    for _ in range(7):
        run.step()
        req = run.request("a")
        seen.append((req.num_output, run.scheduler.policy.rank(req, run.scheduler.view)[0]))
    assert seen == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 0), (6, 0), (7, 0)]
    run.drain()


def test_conserve_bounds_no_online_prompt():
    run = timed_run(ConServe(tbt=0.01), step_seconds=0.0)
    run.ask("first", 8, 10)
    run.steps(1)
    run.ask("second", 1500, 2)
    assert run.steps(1) == [{"first": 1, "second": 1023}]
    run.drain()
