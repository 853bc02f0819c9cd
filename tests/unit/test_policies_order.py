"""Policies that order by size, by age or by deadline, and those that choose victims."""

from __future__ import annotations

import pytest
from support.timed import TimedRun, timed_run

from engine.sched.policies.andes import Andes
from engine.sched.policies.edf import EDF
from engine.sched.policies.fastserve import FastServe
from engine.sched.policies.fcfs import FCFS
from engine.sched.policies.hrrn import HRRN
from engine.sched.policies.least_computed import LeastComputed
from engine.sched.policies.ltr import LTR
from engine.sched.policies.mc_sf import MCSF
from engine.sched.policies.past_future import PastFuture
from engine.sched.policies.residual_sjf import ResidualSJF
from engine.sched.policies.trail import TRAIL


def told(num_output: int) -> dict[str, object]:
    """Hints for the oracle."""
    return {"hints": {"output_tokens": num_output}}


# -- prompts


def test_residual_sjf_takes_the_shortest_prompt_first():
    run = timed_run(ResidualSJF(), max_num_seqs=1)
    for name, length in (("long", 200), ("short", 20), ("medium", 100)):
        run.ask(name, length)
    assert run.order() == ["short", "medium", "long"]


def test_residual_sjf_counts_only_what_is_not_cached():
    run = timed_run(ResidualSJF(), max_num_seqs=1)
    known = list(range(192))
    run.ask("known", known)
    run.drain()
    run.ask("short", 40)
    run.ask("long but known", [*known, 1, 2])
    assert run.order()[1:] == ["long but known", "short"]


@pytest.mark.parametrize(("before", "first"), [(True, "short"), (False, "long")])
def test_hrrn_weighs_what_was_computed_meanwhile_by_size(before, first):
    run = timed_run(HRRN(), max_num_seqs=1)
    run.ask("busy", 64, 2)
    run.ask("long", 48)
    if before:
        run.ask("short", 16)
    run.steps(1)  # 64 prompt tokens: the long one has waited 64 / 48 of its size
    if not before:
        run.ask("short", 16)
    assert run.order()[1] == first


# -- outputs


def test_ltr_gives_seats_to_the_shortest_predicted_output():
    run = timed_run(LTR(), max_num_seqs=1, length_predictor="oracle")
    run.ask("long", 8, 30, **told(30))
    run.steps(5)
    run.ask("short", 8, 4, **told(4))
    run.ask("shorter", 8, 2, **told(2))
    run.drain()
    assert run.ended == ["shorter", "short", "long"]
    assert run.num_preemptions == 1


def test_ltr_lets_nobody_starve():
    run = timed_run(LTR(starve_steps=20, boost_tokens=6), max_num_seqs=1)
    run.ask("long", 8, 12)
    run.steps(2)
    for index in range(60):
        run.ask(f"short{index}", 8, 4)
        run.steps(2)
    steps = [index for index, plan in enumerate(run.plans) if "long" in plan]
    assert steps[:2] == [0, 1]
    assert steps[2:8] == list(range(21, 27)), "twenty steps later, for six steps"
    run.drain()


def test_trail_takes_the_shortest_remainder_and_evicts_only_the_young():
    for generated, evicted in ((4, 1), (17, 0)):
        run = timed_run(TRAIL(young=0.8), max_num_seqs=1, length_predictor="oracle")
        run.ask("running", 8, 20, **told(20))
        run.steps(generated)
        run.ask("short", 8, 2, **told(2))  # shorter than what remains in both cases
        run.drain()
        assert run.num_preemptions == evicted
        assert run.ended == (["short", "running"] if evicted else ["running", "short"])


def test_trail_evicts_nobody_who_has_less_left():
    run = timed_run(TRAIL(), max_num_seqs=1, length_predictor="oracle")
    run.ask("running", 8, 20, **told(20))
    run.steps(12)
    run.ask("short", 8, 10, **told(10))  # shorter in all, but 8 remain of the other
    run.drain()
    assert run.ended == ["running", "short"]
    assert run.num_preemptions == 0


def levels(run: TimedRun, name: str, steps: int) -> list[float]:
    """The request's level after each step."""
    seen = []
    for _ in range(steps):
        run.step()
        seen.append(run.scheduler.view.own("level")[run.request(name)])
    return seen


def test_fastserve_doubles_the_quantum_at_each_level():
    policy = FastServe(quantum=0.01)  # two tokens of 5 ms, by the cost model before any step
    run = timed_run(policy, max_num_seqs=1)
    run.ask("r", 8, 40)
    assert levels(run, "r", 14) == [0] + [1] * 4 + [2] * 8 + [3]
    run.drain()


def test_fastserve_skips_the_levels_a_prompt_would_use_up():
    policy = FastServe(quantum=0.01)
    run = timed_run(policy, max_num_batched_tokens=2048)
    run.ask("short", 8, 2)
    run.ask("long", 1500, 2)  # 36 ms
    view = run.scheduler.view
    assert [view.own("level")[run.request(name)] for name in ("short", "long")] == [0, 2]
    run.drain()


def test_fastserve_lets_new_requests_evict_those_that_sank():
    policy = FastServe(quantum=0.01, max_wait=100.0)
    run = timed_run(policy, max_num_seqs=1)
    run.ask("long", 8, 30)
    run.steps(10)
    run.ask("short", 8, 2)
    run.drain()
    assert run.ended == ["short", "long"]
    run.ask("a", 8, 2)
    run.ask("b", 8, 2)
    run.drain()
    assert run.num_preemptions == 1, "none within a level"


def test_fastserve_lifts_who_waited_too_long():
    policy = FastServe(quantum=0.01, max_wait=20.0)
    run = timed_run(policy, max_num_seqs=1)
    run.ask("long", 8, 30)
    run.steps(10)
    for index in range(40):
        run.ask(f"short{index}", 8, 2)
        run.step()
    steps = [index for index, plan in enumerate(run.plans) if "long" in plan]
    assert 28 <= steps[10] <= 32
    run.drain()


def test_mc_sf_takes_the_shortest_and_leaves_the_running_alone():
    run = timed_run(MCSF(), max_num_seqs=1, length_predictor="oracle")
    run.ask("running", 8, 20, **told(20))
    run.steps(2)
    for name, length in (("long", 30), ("short", 2), ("medium", 10)):
        run.ask(name, 8, length, **told(length))
    run.drain()
    assert run.ended == ["running", "short", "medium", "long"]
    assert run.num_preemptions == 0


# -- memory


def pressed(policy, **options) -> TimedRun:
    """Twenty requests whose outputs are much longer than their prompts, in a small memory."""
    run = timed_run(policy, num_blocks=41, block_size=4, max_num_seqs=16, **options)
    for length in (20, 24, 28) * 20:
        run.scheduler.view.lengths.add(length)
    for index in range(20):
        run.ask(f"r{index}", 8, (20, 24, 28)[index % 3], **told((20, 24, 28)[index % 3]))
    run.drain()
    assert len(run.ended) == 20
    return run


def test_past_future_prevents_the_preemptions_of_filling_the_memory():
    fcfs, careful = pressed(FCFS()), pressed(PastFuture(reserve=0.1))
    assert fcfs.num_preemptions >= 10
    assert careful.num_preemptions <= 1
    reserving = timed_run(PastFuture(), num_blocks=41, block_size=4, max_num_seqs=16)
    for index in range(20):  # nothing is known of lengths: room for the longest output
        reserving.ask(f"r{index}", 8, 100)
    reserving.step()
    assert len(reserving.plans[0]) == 1
    assert len(careful.plans[0]) >= 4


def test_the_victim_is_who_has_computed_least():
    for policy, victim in ((FCFS(), "large"), (LeastComputed(), "small")):
        run = timed_run(policy, num_blocks=13, block_size=4)
        run.ask("first", 15, 20)  # 4 blocks
        run.ask("small", 6, 20)  # 2
        run.ask("large", 23, 4)  # 6: all are taken
        preempted = []
        while not preempted:
            run.step()
            preempted = [r.request_id for r in run.scheduler.view.waiting if r.num_preempted]
        assert preempted == [victim]
        run.drain()


# -- deadlines and experience


def test_edf_takes_the_earliest_deadline_and_may_evict_for_it():
    for preempt, ended in ((True, ["urgent", "soon", "busy"]), (False, ["busy", "urgent", "soon"])):
        run = timed_run(EDF(preempt_for_waiting=preempt), max_num_seqs=1)
        run.ask("busy", 8, 10, deadline=50.0)
        run.steps(2)
        run.ask("soon", 8, 4, deadline=20.0)
        run.ask("urgent", 8, 4, deadline=10.0)
        run.drain()
        assert run.ended == ended


def test_edf_gives_everybody_a_deadline():
    run = timed_run(EDF(default_deadline=30.0), max_num_seqs=1)
    run.ask("none", 8, 4)
    for index in range(40):
        run.ask(f"r{index}", 8, 4, deadline=run.clock.now + 10.0)
        run.step()
    run.drain()
    assert 18 <= run.ended.index("none") <= 21, "those due before 30 s go first, and no others"


def test_andes_takes_the_seat_of_a_reader_who_is_ahead():
    run = timed_run(Andes(ttft=1.0, tbt=10.0), max_num_seqs=1, step_seconds=0.1)
    run.ask("ahead", 16, 40)
    run.steps(20)
    run.ask("new", 16, 8)
    run.drain()
    assert run.ended == ["new", "ahead"]
    run.ask("behind", 16, 8, hints={"tbt": 0.01})
    run.steps(4)
    run.ask("newer", 16, 8)
    run.drain()
    assert run.ended[2:] == ["behind", "newer"]


def test_andes_prefers_more_readers_per_token_of_memory():
    run = timed_run(Andes(), max_num_seqs=1)
    run.ask("large", 64)
    run.ask("small", 8)
    run.ask("medium", 32)
    assert run.order() == ["small", "medium", "large"]


def test_andes_bounds_preemptions_and_waits():
    run = timed_run(Andes(tbt=10.0, max_preemptions=2), max_num_seqs=1, step_seconds=0.1)
    run.ask("victim", 16, 60)
    victim = run.request("victim")
    for index in range(6):
        run.steps(16)
        run.ask(f"r{index}", 16, 2)
    run.drain()
    assert victim.num_preempted == 2

    run = timed_run(Andes(ttft=1.0, tbt=0.2, max_late=45.0), max_num_seqs=1)  # so, 10 s
    run.ask("large", 300, 2)
    for index in range(30):
        run.ask(f"small{index}", 8, 2)
        run.step()
    run.drain()
    assert run.ended.index("large") < 10
