"""What no scheduler can beat: held against the best of all schedules where those can be counted."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from itertools import product

import numpy as np
import pytest

from engine.sched.policies import POLICIES
from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import Profile
from policylab.sim.bounds import WorkBound, bounds, srpt
from policylab.sim.figures import figures
from policylab.sim.run import Engine, run
from policylab.sim.worker import StepCost

COST = StepCost(fixed=4.0, per_seq=1.0, per_token=2.0, per_context=0.5, per_attention=0.25)


def work(*requests: tuple[float, int, int], cost: StepCost = COST, **limits: int) -> WorkBound:
    """Requests as arrival, prompt and output."""
    arrival, prompt, output = zip(*requests, strict=True)
    sizes = {"max_tokens": 4, "max_seqs": 2, "pool": 12} | limits
    return WorkBound(
        arrival=np.array(arrival, dtype=np.float64),
        prompt=np.array(prompt),
        cached=np.zeros(len(prompt), dtype=np.int64),
        output=np.array(output),
        cost=cost,
        **sizes,
    )


def best(work: WorkBound, *, sums_ends: bool) -> float:
    """The least makespan, or the least sum of times of ends, of all schedules there are."""
    totals = (work.prompt + work.decodes).tolist()
    arrivals, prompts = work.arrival.tolist(), work.prompt.tolist()
    heap = [(0.0, 0.0, (0,) * len(totals))]
    seen = set()
    while heap:
        value, now, done = heappop(heap)
        num_left = sum(d != t for d, t in zip(done, totals, strict=True))
        if not num_left:
            return value
        if (now, done) in seen:
            continue
        seen.add((now, done))
        weight = num_left if sums_ends else 1
        later = [a for a in arrivals if a > now]
        if later:
            heappush(heap, (value + weight * (min(later) - now), min(later), done))
        for after, seconds in steps(work, done, [a <= now for a in arrivals], prompts, totals):
            heappush(heap, (value + weight * seconds, now + seconds, after))
    raise AssertionError("nothing ends")


def steps(work, done, came, prompts, totals):
    """What one step may do: who computes how much, and whose tokens are given up before."""
    options = []
    for d, here, prompt, total in zip(done, came, prompts, totals, strict=True):
        if not here or d == total:
            options.append([(d, 0)])
            continue
        begins = {d, 0}
        options.append(
            [(b, n) for b in begins for n in range((max(1, prompt - b) if b < prompt else 1) + 1)]
        )
    for choice in product(*options):
        rows = [(begin, count) for begin, count in choice if count]
        after = tuple(begin + count for begin, count in choice)
        held = sum(a for a, t, (b, n) in zip(after, totals, choice, strict=True) if n or b < t)
        if (
            not rows
            or len(rows) > work.max_seqs
            or sum(n for _, n in rows) > work.max_tokens
            or held > work.pool
        ):
            continue
        shape = StepShape(
            num_seqs=len(rows),
            num_tokens=sum(n for _, n in rows),
            num_decodes=0,
            context=sum(b for b, _ in rows),
            attention=sum(n * b + n * (n + 1) // 2 for b, n in rows),
            seconds=0.0,
        )
        yield after, work.cost.seconds(shape)


def test_one_request_meets_its_bounds() -> None:
    alone = work((3.0, 6, 3), max_seqs=4)
    assert best(alone, sums_ends=False) == bounds(alone).makespan == 3.0 + alone.fastest()[0]
    assert bounds(alone).mean_e2e == alone.fastest()[0] < alone.alone()[0]
    assert bounds(alone).steps == 4 and bounds(alone).by == "chain"


@pytest.mark.parametrize("case", range(4))
def test_no_schedule_beats_the_bounds(case: int, seed: int) -> None:
    dice = random.Random(seed + case)
    fixed_only = StepCost(fixed=1.0, per_seq=0.0, per_token=0.0, per_context=0.0, per_attention=0.0)
    requests = [
        (float(dice.choice([0, 0, dice.randint(0, 9)])), dice.randint(1, 3), dice.randint(1, 3))
        for _ in range(3 if case % 4 == 0 else 2)
    ]
    asked = work(
        *requests,
        cost=dice.choice([COST, fixed_only]),
        max_tokens=dice.randint(2, 4),
        max_seqs=dice.randint(1, 3),
        pool=dice.randint(6, 12),
    )
    least = bounds(asked)
    makespan = best(asked, sums_ends=False)
    total = best(asked, sums_ends=True)
    assert least.makespan <= makespan + 1e-9, (seed, case, requests)
    mean = (total - asked.arrival.sum()) / len(requests)
    assert least.mean_e2e <= mean + 1e-9, (seed, case, requests)
    assert makespan <= 4 * least.makespan  # and is of its size


def test_which_bound_asks_for_most_steps() -> None:
    same = [(0.0, 8, 8)] * 6
    assert bounds(work(*same, max_tokens=2, max_seqs=9, pool=10_000)).by == "tokens"
    assert bounds(work(*same, max_tokens=64, max_seqs=1, pool=10_000)).by == "seats"
    assert bounds(work(*same, max_tokens=64, max_seqs=9, pool=16)).by == "KV area"
    assert bounds(work((0.0, 8, 50), max_tokens=64, max_seqs=9, pool=10_000)).by == "chain"


def test_the_shortest_remaining_goes_first() -> None:
    """A job that comes and is shorter than what is left of another takes its place."""
    ends = srpt(np.array([0.0, 1.0, 20.0]), np.array([10.0, 2.0, 5.0]))
    assert ends.tolist() == [12.0, 3.0, 25.0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_stays_above_the_bounds(policy: str) -> None:
    engine = Engine(max_num_seqs=8, num_blocks=40, max_num_batched_tokens=64)
    workload = "log-uniform(num_requests=60, prompt_tokens=(8, 200), output_tokens=(2, 60))"
    for rate in (5.0, 1e6):
        found = figures(run(policy, workload, engine, rate=rate))
        assert found.bounds is not None
        assert found.makespan >= found.bounds.makespan
        assert found.mean_e2e >= found.bounds.mean_e2e
        assert found.num_steps >= found.bounds.steps


def test_a_profile_has_bounds_and_slowdowns() -> None:
    profile = Profile(
        name="made",
        is_calibrated=True,
        knots=[64],
        coefficients=[5e-3, 1e-3, 1e-5, 1e-5, 1e-8, 1e-9, 3e-5, 1e-5],
        factors={"decode": 1.1},
    )
    engine = Engine(max_num_batched_tokens=128, cost=profile)
    found = figures(run("fcfs", "log-uniform(num_requests=30)", engine, rate=1e-3))
    assert found.value("slowdown.p99") == pytest.approx(1.0, abs=1e-3)
    busy = figures(run("fcfs", "log-uniform(num_requests=30)", engine, rate=1e3))
    assert busy.makespan >= busy.bounds.makespan and busy.mean_e2e >= busy.bounds.mean_e2e
