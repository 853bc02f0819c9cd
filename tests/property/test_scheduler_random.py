"""Random workloads against the digest worker: a wrong block would be a wrong token."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.simulate import expected, make_run, random_requests

from engine.errors import RequestError
from engine.sched import Fit, Resource
from engine.sched.policies import POLICIES
from engine.sched.scheduler import Scheduler

SEEDS = pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)], ids=str
)


def random_run(rng: random.Random, depth: int, policy: str, **options):
    seats = rng.randint(1, 24)
    return make_run(
        depth=depth,
        policy=policy,
        num_blocks=rng.randint(8, 40),
        block_size=rng.choice([1, 2, 4, 8]),
        caching=rng.random() < 0.8,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, rng.randint(1, 64)),
        max_model_len=64,
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        **options,
    )


def drive(run, rng: random.Random, requests, abort_rate: float = 0.0) -> set[str]:
    """Add the requests over time, abort some; returns the ids aborted."""
    todo, aborted = list(requests), set()
    while todo or run.scheduler.has_unfinished_requests():
        while todo and rng.random() < 0.4:
            request = todo.pop(0)
            try:
                run.add(request)
            except RequestError:
                continue
        if rng.random() < abort_rate and run.outputs:
            victim = rng.choice(sorted(run.outputs))
            for req in run.scheduler.finish_requests(victim, "abort"):
                aborted.add(req.request_id)
                run.finished[req.request_id] = ("abort", None)
        run.step()
    run.drain()
    return aborted


@SEEDS
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_everybody_gets_exactly_the_right_tokens(depth, policy, seeds):
    for seed in seeds:
        rng = random.Random(seed)
        run = random_run(rng, depth, policy)
        requests = random_requests(rng, 30)
        aborted = drive(run, rng, requests, abort_rate=0.1 if seed % 2 else 0.0)
        for request in requests:
            if request.request_id not in run.outputs:
                continue
            out = run.outputs[request.request_id]
            right = expected(request.prompt_token_ids, request.max_tokens)
            if request.request_id in aborted:
                assert out == right[: len(out)], f"seed {seed}"
            else:
                assert out == right, f"seed {seed}, request {request.request_id}"
                assert run.finished[request.request_id] == ("length", None), f"seed {seed}"


COLUMNS = (
    *("rows", "slots", "generations", "starts", "counts", "samples"),
    *("block_slots", "block_ids"),
)


class InColumns(Scheduler):
    few_decodes = 0


class OneByOne(Scheduler):
    few_decodes = 10**9


class WholeLoop(OneByOne):
    """Overrides a part, so every request goes through the whole loop."""

    def tokens_for(self, req, step):
        return super().tokens_for(req, step)


class Fussy(Resource):
    """Has every second request in one step at a time, and wants to be asked about every third."""

    def serializes(self, req):
        return req.arrival % 2 == 0

    def watches(self, req):
        return req.arrival % 3 == 0

    def fit(self, req, num_tokens, step):
        return Fit(min(num_tokens, 5) if self.watches(req) else num_tokens)


SCHEDULERS = {"columns": InColumns, "one by one": OneByOne, "hook": OneByOne, "loop": WholeLoop}
WAYS = tuple(SCHEDULERS)


def plans_of(seed: int, way: str, resources):
    """All plans and outputs of a random run that grants in one of the ways there are."""
    rng = random.Random(seed)
    depth, policy = rng.randint(1, 3), rng.choice(["fcfs", "priority"])
    options = {"scheduler_cls": SCHEDULERS[way]}
    if way == "hook":
        own = {"chunk": lambda self, req, num_tokens, view: num_tokens}
        policy = type("Own", (POLICIES[policy],), own)()
    run = random_run(rng, depth, policy, resources=resources, **options)
    plans = []
    schedule = run.scheduler.schedule

    def recorded():
        plans.append(schedule())
        return plans[-1]

    run.scheduler.schedule = recorded
    drive(run, rng, random_requests(rng, 40), abort_rate=0.1 if seed % 3 == 0 else 0.0)
    return plans, run.outputs, run.finished


def check_same_paths(seed: int) -> int:
    """All ways plan the same in every state of a run; returns how many states it had.

    Watched requests get their blocks behind those granted in decodes, so these have other numbers.
    """
    is_fussy = seed % 3 == 1
    columns = [name for name in COLUMNS if not (is_fussy and name.startswith("block"))]
    resources = (Fussy(),) if is_fussy else ()
    (first, *results), *others = (plans_of(seed, way, resources) for way in WAYS)
    for way, (plans, *same) in zip(WAYS[1:], others, strict=True):
        assert len(first) == len(plans), f"seed {seed}, {way}"
        assert results == same, f"seed {seed}, {way}"
        for one, other in zip(first, plans, strict=True):
            for column in columns:
                same_column = np.array_equal(getattr(one, column), getattr(other, column))
                assert same_column, f"seed {seed}, {way}, step {one.step}, {column}"
    return len(first)


def test_in_bulk_and_one_by_one_gives_the_same_plans():
    assert sum(check_same_paths(seed) for seed in range(12)) > 1000


@pytest.mark.slow
def test_in_bulk_and_one_by_one_gives_the_same_plans_in_100_000_states():
    num_states, seed = 0, 1000
    while num_states < 100_000:
        num_states += check_same_paths(seed)
        seed += 1
    print(f"{num_states} states of {seed - 1000} runs")


def test_same_inputs_give_the_same_plans():
    for seed in range(10):
        runs = []
        for _ in range(2):
            rng = random.Random(seed)
            run = random_run(rng, 2, "priority")
            drive(run, rng, random_requests(rng, 30), abort_rate=0.1)
            runs.append(run)
        assert runs[0].plans == runs[1].plans, f"seed {seed}"


@SEEDS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failing_row_fails_alone_and_leaves_the_cache(depth, seeds):
    for seed in seeds:
        rng = random.Random(seed)
        bad = {str(rng.randrange(30)) for _ in range(4)}

        def fail(seq, position, bad=bad):
            return "poisoned" if seq.request_id in bad and position > 5 else None

        run = random_run(rng, depth, "fcfs", fail=fail)
        requests = random_requests(rng, 30)
        drive(run, rng, requests)
        for request in requests:
            name = request.request_id
            if name not in run.outputs:
                continue
            right = expected(request.prompt_token_ids, request.max_tokens)
            longest = len(request.prompt_token_ids) + request.max_tokens - 1
            if name in bad and longest > 5:
                assert run.finished[name] == ("error", None), f"seed {seed}"
                assert run.outputs[name] == right[: len(run.outputs[name])], f"seed {seed}"
            else:
                assert run.outputs[name] == right, f"seed {seed}, request {name}"
