"""Statistics say what happened, gauge by gauge and counter by counter."""

from __future__ import annotations

import msgspec
import pytest
from support.simulate import make_request, make_run

from engine.errors import RefusedError
from engine.sched import Fit, OnRefuse, Resource, Scheduler

PROMPT = list(range(100, 108))


class Parks(Resource):
    """Holds back the requests of one user."""

    name = "slow"

    def fit(self, req, num_tokens, step):
        return Fit(0 if req.user == "slow" else num_tokens, on_refuse=OnRefuse.PARK)


def told(run) -> dict[str, object]:
    """What the statistics say, without what is zero or empty, how long hooks took, and groups."""
    stats = msgspec.structs.asdict(run.scheduler.make_stats())
    del stats["hook_seconds"], stats["kv_groups"]
    return {name: value for name, value in stats.items() if value}


def evict(run, name):
    """A step in which nothing happens but that."""
    step = run.scheduler.begin_step()
    run.scheduler.preempt(run.scheduler.roster.by_id[name], step)
    run.worker.launch(run.scheduler.seal(step))


def make_run_for_four(clock):
    """One that is parked, one that goes, one that fails behind its prompt, one that expires."""
    run = make_run(
        num_blocks=11,
        block_size=4,
        max_num_seqs=2,
        max_waiting_requests=4,
        clock=clock,
        resources=[Parks()],
        fail=lambda seq, upto: "poison" if seq.request_id == "bad" and upto > 8 else None,
    )
    assert told(run) == {}
    run.add(make_request("parked", PROMPT, 3, user="slow", queue_deadline=4.5))
    run.add(make_request("a", [1] * 8, 9))
    run.add(make_request("bad", [2] * 8, 9))
    run.add(make_request("late", [3] * 8, 9, queue_deadline=2.5))
    with pytest.raises(RefusedError):
        run.add(make_request("refused", PROMPT, 3))
    return run


def test_statistics_of_a_run_step_by_step():
    now = [1.0]
    run = make_run_for_four(lambda: now[0])
    waiting = {"num_refused": 1}
    assert told(run) == {"num_waiting": 4, "waiting_by_cause": {"next step": 4}, **waiting}

    run.step()  # two prompts of two blocks each; a third waits for a seat
    assert told(run) == {
        "num_running": 2,
        "num_waiting": 1,
        "num_parked": 1,
        "waiting_by_cause": {"seats": 1, "slow": 1},
        "kv_usage": pytest.approx(0.4),
        "prefix_queries": 16,
        "prefix_missed": {"never seen": 8},
        "num_steps": 1,
        "num_scheduled_tokens": 16,
        **waiting,
    }
    now[0] = 2.0
    run.step()  # a decode each, in a block more; one of them fails
    assert told(run) == {
        "num_running": 1,
        "num_waiting": 1,
        "num_parked": 1,
        "waiting_by_cause": {"seats": 1, "slow": 1},
        "kv_usage": pytest.approx(0.3),
        "prefix_queries": 16,
        "prefix_missed": {"never seen": 8},
        "num_failed": 1,
        "num_steps": 2,
        "num_scheduled_tokens": 18,
        **waiting,
    }
    now[0] = 3.0
    run.step()  # the one that waited has met its deadline
    assert told(run) == {
        "num_running": 1,
        "num_parked": 1,
        "waiting_by_cause": {"slow": 1},
        "kv_usage": pytest.approx(0.3),
        "prefix_queries": 16,
        "prefix_missed": {"never seen": 8},
        "num_failed": 1,
        "num_expired": 1,
        "num_steps": 3,
        "num_scheduled_tokens": 19,
        "wait_seconds": {"seats": 2.0},
        **waiting,
    }


def test_statistics_of_a_cache_tell_those_apart_who_were_preempted():
    run = make_run(num_blocks=30, block_size=4)
    run.add(make_request("a", [1] * 9, 9))
    run.step()
    run.step()
    assert told(run)["prefix_queries"] == 9
    evict(run, "a")
    assert told(run)["num_preemptions"] == 1
    run.add(make_request("b", [1] * 9, 1))
    run.step()
    stats = told(run)
    assert (stats["prefix_queries"], stats["prefix_hits"]) == (18, 8)
    assert (stats["preempted_queries"], stats["preempted_hits"]) == (11, 8)
    run.drain()


@pytest.mark.behaviour(70)
def test_statistics_are_made_on_request_and_not_by_a_step(monkeypatch):
    made = []
    monkeypatch.setattr(Scheduler, "make_stats", lambda scheduler: made.append(1))
    run = make_run()
    for client in (3, 2, 5):
        run.add(make_request(str(client), [client] * 4, 9, client_index=client))
    run.drain()
    assert len(run.ends) == 3 and not made


def test_the_story_of_a_request_is_told_with_each_start_and_with_its_end():
    now = [1.0]
    run = make_run(num_blocks=30, block_size=4, clock=lambda: now[0])
    run.add(make_request("a", [1] * 9, 4))
    now[0] = 2.0
    run.step()
    run.step()
    now[0] = 3.0
    evict(run, "a")
    now[0] = 5.0
    run.drain()
    events = [("queued", 1.0), ("scheduled", 2.0), ("preempted", 3.0), ("scheduled", 5.0)]
    first, second = run.starts["a"]
    assert (first.num_preemptions, first.events) == (0, events[:2])
    assert sum(first.waits.values()) == 1.0
    assert (second.num_preemptions, second.events) == (1, events)
    assert sum(second.waits.values()) == 3.0
    assert (second.num_cached_tokens, second.scheduled_time) == (0, 2.0)
    end = run.ends["a"]
    assert (end.num_preemptions, end.events, end.waits) == (1, events, second.waits)


def test_rounds_without_work_are_no_steps():
    """A core steps in this way if it is idle, or if all requests wait."""
    run = make_run(num_blocks=11, block_size=4, resources=[Parks()])

    def step():
        """Plan a step, and launch it if it is not empty."""
        if (plan := run.scheduler.schedule()).num_tokens:
            run.scheduler.update_from_output(plan, run.worker.collect(run.worker.launch(plan)))

    for _ in range(5):
        step()
    assert told(run) == {}
    run.add(make_request("parked", PROMPT, 3, user="slow"))
    for _ in range(5):
        step()
    assert run.scheduler.make_stats().num_steps == 0
    run.add(make_request("a", PROMPT, 3))
    for _ in range(9):
        step()
    assert run.scheduler.make_stats().num_steps == 3
