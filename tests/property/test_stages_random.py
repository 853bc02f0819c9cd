"""Stages of a pipeline: a request decodes in one step in flight, decodes are spread over the steps,
and the first stage computes only tokens that plans brought. The seeds are printed."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from support.simulate import Run, expected, make_request, make_run, random_requests

from engine.errors import ConfigError
from engine.sched.micro_batches import MicroBatches
from engine.sched.policies.priority import Priority
from policylab.verify.draw import draw_case
from policylab.verify.simulation import Simulation
from policylab.verify.stages import FirstStage, StagedWorker


def staged_run(num_stages: int, **options) -> Run:
    """A run whose worker has as many stages as steps in flight."""
    run = make_run(depth=num_stages, pipeline_parallel_size=num_stages, **options)
    run.worker = StagedWorker(run.scheduler.kv.pool.num_blocks, run.scheduler.kv.block_size)
    return run


def sizes(run: Run, num_steps: int) -> list[int]:
    """The numbers of rows of the next steps."""
    first = len(run.plans)
    while len(run.plans) < first + num_steps:
        run.step()
    return [len(plan) for plan in run.plans[first : first + num_steps]]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tokens_are_those_of_one_stage(num_stages: int, policy: str) -> None:
    first = int(os.environ.get("METRONOME_SEED") or random.SystemRandom().randrange(2**31))
    print(f"METRONOME_SEED={first} repeats this run")
    num_preemptions = sum(
        compare_with_one_stage(num_stages, policy, seed) for seed in range(first, first + 2)
    )
    assert num_preemptions, "the pool is meant to be too small"


def compare_with_one_stage(num_stages: int, policy: str, seed: int) -> int:
    """Compare the tokens of random requests; returns how often stages saw a preemption."""
    rng = random.Random(seed)
    requests = random_requests(rng, 20)
    aborted = set(rng.sample([req.request_id for req in requests], 5))
    options = {"num_blocks": 24, "block_size": 4, "policy": policy}
    options |= {"max_num_batched_tokens": 24, "max_num_seqs": 12}
    runs = [make_run(**options), staged_run(num_stages, **options)]
    for run in runs:
        dice = random.Random(seed)
        for request in requests:
            run.add(request)
            for _ in range(dice.randrange(4)):
                run.step()
            if dice.random() < 0.3:
                name = dice.choice(sorted(aborted))
                run.scheduler.finish_requests(name)
        run.scheduler.finish_requests(aborted)
        run.drain()
    one, many = runs
    for request in requests:
        name = request.request_id
        if name not in aborted:
            assert many.outputs[name] == one.outputs[name] and many.outputs[name], name
    return many.scheduler.settler.counters.num_preemptions


@pytest.mark.parametrize(
    ("num_stages", "num_requests"), [(2, 7), (3, 12), (4, 10), (4, 3), (3, 40)]
)
def test_decodes_are_spread_evenly(num_stages: int, num_requests: int) -> None:
    run = staged_run(num_stages, max_num_seqs=64)
    for index in range(num_requests):
        run.add(make_request(str(index), [index] * 3, 90 if index % 3 else 30))
    sizes(run, 4 * num_stages)
    for _ in range(2):  # with all requests, then after a third of them has ended
        num_running = len(run.scheduler.roster.running)
        counts = sizes(run, min(num_stages, num_running))
        assert sum(counts) == num_running
        assert max(counts) - min(counts) <= 1
        while len(run.finished) < (num_requests + 2) // 3:
            run.step()
        sizes(run, 4 * num_stages)
    run.drain()


def test_a_new_request_joins_the_steps_with_the_fewest_decodes() -> None:
    run = staged_run(3)
    for index in range(7):
        run.add(make_request(str(index), [index] * 3, 60))
    sizes(run, 9)
    assert sorted(sizes(run, 3)) == [2, 2, 3]
    run.add(make_request("new", [9] * 3, 60))
    sizes(run, 9)
    assert sorted(sizes(run, 3)) == [2, 3, 3]
    run.drain()


def test_chunks_of_a_prompt_follow_each_other_and_a_decode_waits_for_its_token() -> None:
    run = staged_run(3, max_num_batched_tokens=16, max_num_seqs=4)
    run.add(make_request("a", list(range(40)), 4))
    while run.launch() and len(run.flight) < 5:
        pass
    assert run.plans[:3] == [{"a": 16}, {"a": 16}, {"a": 8}]
    assert len(run.flight) == 3
    run.drain()
    assert run.outputs["a"] == expected(list(range(40)), 4)


def test_a_prompt_is_cut_so_that_each_stage_has_a_chunk() -> None:
    run = staged_run(3, max_num_batched_tokens=64, min_stage_chunk=16)
    run.add(make_request("a", list(range(40)), 4))
    run.add(make_request("b", list(range(9)), 4))
    run.drain()
    assert run.plans[:3] == [{"a": 16, "b": 9}, {"a": 16}, {"a": 8}]
    assert run.outputs["a"] == expected(list(range(40)), 4)


@pytest.mark.parametrize(("num_stages", "first"), [(2, [25, 21, 19]), (3, [12, 11, 11])])
def test_the_chunks_of_a_long_prompt_are_larger(num_stages: int, first: list[int]) -> None:
    run = staged_run(num_stages, max_num_batched_tokens=64, min_stage_chunk=4, num_blocks=200)
    run.add(make_request("a", list(range(200)), 1))
    run.drain()
    chunks = [plan["a"] for plan in run.plans if "a" in plan]
    assert chunks[:3] == first and chunks == sorted(chunks, reverse=True)
    assert chunks[-2] == 4 and sum(chunks) == 200


class PromptsFirst(Priority):
    """A token is kept for each decode."""

    def order(self, view):
        return [*view.by_rank(), *view.waiting]


def test_a_prompt_leaves_room_for_the_decodes_of_its_step_alone() -> None:
    run = staged_run(4, policy=PromptsFirst(), max_num_batched_tokens=16, max_num_seqs=16)
    for index in range(12):
        run.add(make_request(str(index), [index], 40))
    sizes(run, 12)
    run.add(make_request("new", [9] * 40, 4, priority=-1))
    sizes(run, 8)
    chunks = [plan["new"] for plan in run.plans if plan.get("new", 0) > 1]
    assert chunks == [13, 13, 13]
    run.drain()


def test_plans_for_one_stage_bring_no_tokens() -> None:
    run = make_run()
    run.add(make_request("a", [1, 2, 3], 8))
    for _ in range(5):
        run.launch()
        assert run.flight[0][0].new_token_ids is None
        run.settle()
    assert not run.scheduler.resources.members


def test_fewer_stages_than_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 0, must be at least 1"):
        make_run(pipeline_parallel_size=0)


def next_token_is_missing(self: MicroBatches, plan) -> None:
    """In place of ``describe``."""


def all_in_one_step(self: MicroBatches, step) -> None:
    """In place of ``begin_step``."""
    step.decode_room = 1000


describe = MicroBatches.describe


def other_token(self: MicroBatches, plan) -> None:
    """In place of ``describe``."""
    describe(self, plan)
    if plan.new_token_ids is not None:
        wrong = plan.new_token_ids + (plan.new_token_ids >= 0)
        plan.new_token_ids = wrong.astype(np.int32)


@pytest.mark.parametrize(
    ("hook", "fault", "found"),
    [
        ("describe", next_token_is_missing, "token no plan has brought"),
        ("describe", next_token_is_missing, "real stages refuse the plan: step"),
        ("describe", other_token, "expected"),
        ("begin_step", all_in_one_step, "decodes are in a step, more than"),
        ("serializes", lambda self, req: False, "in two steps in flight"),
    ],
)
def test_what_a_pipeline_may_not_do_is_found(monkeypatch, hook: str, fault, found: str) -> None:
    monkeypatch.setattr(MicroBatches, hook, fault)
    if "real stages" in found:
        monkeypatch.setattr(FirstStage, "read", lambda self, plan, work: [[]] * len(work))
    cases = (draw_case(seed) for seed in range(1000))
    staged = (case for case in cases if case.setup.config.pipeline_parallel_size > 1)
    messages = []
    for case, _ in zip(staged, range(6), strict=False):
        try:
            Simulation(case).run()
        except AssertionError as error:
            messages.append(str(error))
    assert any(found in message for message in messages), messages
