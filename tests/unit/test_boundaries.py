"""Where a rule begins and where it ends: what is one short of it, and whom it does not concern."""

from __future__ import annotations

import pytest
from support.simulate import expected, make_request, make_run

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.sched.plugins.find import choose
from engine.sched.policies import FCFS
from policylab.verify.fake import DigestWorker

PROMPT = list(range(100, 140))


@pytest.mark.parametrize("stop", [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32])
def test_any_number_may_be_a_stop_token(stop):
    """The table has 32 bits for it."""
    run = make_run()
    params = SamplingParams(max_tokens=3, stop_token_ids=[stop])
    run.add(make_request("a", PROMPT, 3, params=params))
    run.drain()
    assert run.outputs["a"] == expected(PROMPT, 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_concerns_nobody_who_shares_nothing_with_it(depth):
    """Neither those who run beside it nor what is cached of others."""
    run = make_run(depth=depth, block_size=4)
    run.worker = DigestWorker(
        1000, 4, fail=lambda seq, upto: "poison" if seq.request_id == "bad" else None
    )
    cached, other = [7] * 40, [8] * 40
    run.add(make_request("cached", cached, 1))
    run.drain()
    run.add(make_request("other", other, 20))
    run.add(make_request("bad", [9] * 40, 20))
    run.drain()
    assert run.finished["bad"] == ("error", None)
    assert run.ends["other"].num_preemptions == 0 and run.outputs["other"] == expected(other, 20)
    for name, prompt in (("cached again", cached), ("other again", other)):
        run.add(make_request(name, prompt, 1))
        assert run.scheduler.kv.cached_prefix(run.scheduler.roster.by_id[name]) == 36
    run.drain()


class Untold(FCFS):
    """A hook written in C, which does not say what it takes."""

    chunk = min


def test_a_hook_that_does_not_tell_what_it_takes_is_tried():
    assert type(choose(SchedulerConfig(scheduling_policy=Untold)).policy) is Untold


def test_deadlines_at_one_moment_are_met_at_that_moment():
    """One request or several may have the deadline; the earliest is reported first."""
    now = [0.0]
    run = make_run(max_num_seqs=1, clock=lambda: now[0])
    run.add(make_request("runs", [1] * 4, 90))
    run.step()
    for name in "cab":
        run.add(make_request(name, PROMPT, 3, queue_deadline=5.0, end_deadline=5.0))
    run.add(make_request("later", PROMPT, 3, queue_deadline=5.5))
    run.add(make_request("sooner", PROMPT, 3, end_deadline=4.5))
    now[0] = 4.0
    run.step()
    assert run.finished == {}
    now[0] = 5.0
    run.step()
    assert list(run.finished) == ["sooner", "c", "a", "b"]
    assert {run.ends[name].reason for name in run.finished} == {"deadline"}
    assert run.scheduler.make_stats().num_expired == 4
    now[0] = 6.0
    run.drain()
    assert run.ends["later"].message == "the request was not started by its deadline"
    assert run.ends["runs"].reason == "length"


class Turning(FCFS):
    """The first to come is first until five o'clock, the last from then on."""

    dynamic = True

    def rank(self, req, view):
        return (req.arrival if view.now < 5 else -req.arrival,)


def test_a_rank_that_moves_counts_for_those_who_run_and_those_who_wait():
    now = [4.0]
    run = make_run(
        policy=Turning(),
        clock=lambda: now[0],
        max_num_seqs=2,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=8,
    )
    for index, name in enumerate(["a", "b", "c", "d"]):
        run.add(make_request(name, [index + 1] * (64 if index < 2 else 8), 1))
    run.step()
    now[0] = 5.0
    run.step()
    assert run.plans == [{"a": 8, "b": 4}, {"b": 8, "a": 4}]
    run.drain()
    ended = list(run.finished)
    assert ended.index("b") < ended.index("a") and ended.index("d") < ended.index("c")


def test_there_is_room_for_any_number_of_requests_again_and_again():
    """Rows are added as they are needed, and none is lost when everybody has gone."""
    run = make_run(max_num_seqs=32)
    for turn in range(2):
        for index in range(200):
            run.add(make_request(f"{turn}-{index}", [index + 1] * 4, 3))
        run.drain()
    assert run.outputs["0-199"] == run.outputs["1-199"] == expected([200] * 4, 3)


class EvictsAll(FCFS):
    """Clears the seats in the third step."""

    def evict(self, view):
        return list(view.running) if view.step.index == 3 else ()


@pytest.mark.parametrize("num_running", [1, 2, 5])
def test_a_policy_may_evict_everybody(num_running):
    run = make_run(policy=EvictsAll())
    for index in range(num_running):
        run.add(make_request(str(index), [index + 1] * 20, 6))
    run.drain()
    assert [end.num_preemptions for end in run.ends.values()] == [1] * num_running
