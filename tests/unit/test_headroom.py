"""Headroom for running requests is kept where computing again costs more than waiting."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from support.simulate import make_request, make_run

from engine.config.cache import CacheConfig
from engine.config.sched import SchedulerConfig
from engine.core.recording import describe, record
from engine.core.replay import replay
from engine.kv.manager import KVManager
from engine.observe import steplog
from engine.observe.steplog import StepLog, StepLogWriter
from engine.sched import Admission, LinearCost, StepShape
from engine.sched.plugins.find import make_scheduler
from engine.sched.policies import FCFS
from engine.sched.predict.headroom import LEARNING_STEPS, Headroom
from policylab.verify.fake import CountingWorker

EQUAL, DEAR = (1.0, 0.0), (0.02, 0.0008)  # seconds of a step: fixed, and a token's


def random_steps(rng, count, fixed, token, noise=0.0):
    """Steps of decodes and a piece of a prompt."""
    for _ in range(count):
        num_decodes, num_prompt = rng.randint(1, 60), rng.choice((0, rng.randint(2, 500)))
        num_tokens = num_decodes + num_prompt
        context = 200 * num_decodes
        pairs = context + num_decodes + num_prompt * (num_prompt + 1) // 2
        seconds = (fixed + token * num_tokens) * rng.uniform(1 - noise, 1 + noise)
        rows = num_decodes + (num_prompt > 0)
        yield StepShape(rows, num_tokens, num_decodes, context, pairs, seconds)


def judged(steps, num_tokens=200.0):
    """What is made of these steps."""
    headroom, cost = Headroom(), LinearCost()
    for step in steps:
        cost.observe(step)
    headroom.judge(1, cost, num_tokens)
    return headroom.is_kept


# -- what is made of the measured steps


def test_the_interval_holds_the_truth_and_shrinks(seed):
    rng, weights, num_within = random.Random(seed), (-1.5, 0.0, 200.0, 0.0, 0.0), 0
    for _ in range(60):
        errors, cost = [], LinearCost(memory=10**6)
        for step in random_steps(rng, 400, *DEAR, noise=0.2):
            cost.observe(step)
            if cost.num_observed in (64, 400):
                value, error = cost.combine(weights)
                errors.append(error)
        num_within += abs(value - (-1.5 * 0.02 + 200 * 0.0008)) <= 2 * error
        assert errors[1] < errors[0], f"seed {seed}"
    assert num_within >= 50, f"seed {seed}: {num_within} of 60"
    assert LinearCost().combine(weights)[1] == np.inf, "nothing is known of the error yet"


def test_it_is_kept_where_computing_again_is_dear(seed):
    steps = list(random_steps(random.Random(seed), 200, *DEAR, noise=0.1))
    assert judged(steps)
    assert not judged(steps, num_tokens=5.0), "little would have to be computed again"
    assert not judged(random_steps(random.Random(seed), 200, *EQUAL, noise=0.1))


def test_it_is_not_kept_before_enough_steps_were_measured(seed):
    steps = list(random_steps(random.Random(seed), LEARNING_STEPS, *DEAR))
    assert not judged(steps[:-1])
    assert judged([*steps, *steps])


def test_it_is_not_kept_while_the_interval_contains_both_answers(seed):
    """A wait costs 1.5 of what is fixed, computing again 1.6: few steps do not tell them apart."""
    token, rng = 1.6 * 0.02 / 200, random.Random(seed)
    kept = [judged(random_steps(rng, 64, 0.02, token, noise=0.6)) for _ in range(40)]
    assert sum(kept) <= 6, f"seed {seed}"


# -- what it does


class Timed(CountingWorker):
    """Answers at once and says how long it took."""

    def __init__(self, fixed, token):
        super().__init__()
        self.fixed, self.per_token = fixed, token

    def launch(self, plan):
        result = super().launch(plan)
        result.seconds = self.fixed + self.per_token * plan.num_tokens
        return result


def learnt(costs, policy="fcfs", **options):
    """A run that has measured enough steps of these costs, and in which nobody is left."""
    run = make_run(num_blocks=101, caching=False, policy=policy, max_num_seqs=32, **options)
    run.worker = Timed(*costs)
    for index in range(12):
        run.add(make_request(str(index), [index] * (10 + 7 * index), 20))
        for _ in range(6):
            run.step()
    run.drain()
    run.plans.clear()
    return run


@pytest.mark.parametrize(("costs", "num_running"), [(DEAR, 23), (EQUAL, 25)])
def test_a_request_starts_beside_a_block_for_each_fourth_that_runs(costs, num_running):
    """Each takes 4 of 100 blocks. The next would leave 4, and 23 that run should have 5."""
    run = learnt(costs, max_num_batched_tokens=2048)
    for index in range(30):
        run.add(make_request(f"r{index}", [index] * 60, 40))
    run.step()
    assert len(run.scheduler.roster.running) == num_running
    run.drain()


@pytest.mark.parametrize(("costs", "num_running"), [(DEAR, 1), (EQUAL, 2)])
def test_a_request_starts_beside_what_a_prompt_was_promised(costs, num_running):
    run = learnt(costs, max_num_batched_tokens=256, long_prefill_token_threshold=128)
    run.add(make_request("long", [1] * 1400, 10))  # 88 of 100 blocks, in pieces
    run.add(make_request("other", [2] * 300, 10))  # 19
    run.step()
    assert len(run.scheduler.roster.running) == num_running
    run.drain()


class AdmitsAll(FCFS):
    """Lets everybody start whose first piece fits."""

    def admit(self, req, view):
        return Admission.YES


@pytest.mark.parametrize(("costs", "most_beside"), [((0.02, 0.02), 6), (EQUAL, 20)])
def test_an_own_admit_gives_away_what_was_promised_only_where_that_costs_little(costs, most_beside):
    run = learnt(costs, AdmitsAll(), max_num_batched_tokens=64, long_prefill_token_threshold=32)
    run.add(make_request("early", [5] * 1500, 4))  # 94 of 100 blocks
    for index in range(200):
        run.add(make_request(f"r{index}", [index] * 8, 7))
    most = 0
    while not run.outputs["early"]:
        run.step()
        assert "early" in run.plans[-1]
        most = max(most, len(run.plans[-1]) - 1)
    assert most == most_beside
    run.drain()


# -- step logs


def run_recorded(path: Path, rng: random.Random) -> None:
    """Requests in a pool that is too small for them, on steps that are dear."""
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16, max_model_len=256)
    kv = KVManager(60, 4)
    header = describe(config, CacheConfig(block_size=4), kv, seed=0)
    scheduler = record(
        path, header, lambda clock: make_scheduler(config, kv, clock=clock, seed=0), float
    )
    worker, flight = Timed(*DEAR), deque()
    for index in range(60):
        scheduler.add_request(
            make_request(str(index), [index] * rng.randint(4, 60), rng.randint(4, 60))
        )
    while scheduler.has_requests() or flight:
        plan = scheduler.schedule()
        if not plan.is_empty:
            flight.append((plan, worker.launch(plan)))
        if flight:
            scheduler.update_from_output(*flight.popleft())
    scheduler.shutdown()


def test_what_was_judged_is_in_the_step_log_and_is_not_judged_again(tmp_path, seed, monkeypatch):
    """Floats may be rounded otherwise where a log is replayed."""
    path = tmp_path / "log"
    run_recorded(path, random.Random(seed))
    found = [record for record in StepLog(path) if isinstance(record, steplog.TimedDecision)]
    assert any(record.is_kept for record in found), f"seed {seed}"
    assert replay(path).difference is None, f"seed {seed}"
    monkeypatch.setattr(LinearCost, "combine", lambda self, weights: (-1.0, 0.0))
    assert replay(path).difference is None, f"seed {seed}: another machine judges otherwise"
    bare = StepLogWriter(tmp_path / "bare", StepLog(path).header)
    for kept in StepLog(path):
        if not isinstance(kept, steplog.TimedDecision):
            bare.write(kept)
    bare.close()
    assert replay(tmp_path / "bare").difference is not None, f"seed {seed}: it did not matter"
