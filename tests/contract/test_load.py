"""A load is a rate that all seeds and numbers of requests share, and that the engine can serve."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

from policylab.sim.bounds import work_of
from policylab.sim.compare import Experiment, compare
from policylab.sim.demand import demand, drawn, most_per_second
from policylab.sim.run import Engine, capacity_of, rate_at, run
from policylab.sim.workloads import find_workload

SHIPPED = (
    "log-uniform(num_requests=40)",
    *(
        pytest.param(f"{name}(num_requests=40)", marks=pytest.mark.slow)
        for name in ("agents", "tiers")
    ),
)
SMALL = Engine(max_num_seqs=8, max_num_batched_tokens=128, num_blocks=120)
SHORT = "log-uniform(prompt_tokens=(8,100),output_tokens=(2,40),num_requests=40)"


@pytest.mark.parametrize("name", SHIPPED)
def test_seed_bases_have_one_rate(name: str) -> None:
    rates = [
        compare(
            Experiment(
                policies=["fcfs"], workload=find_workload(name), loads=[0.9], seeds=[base, base + 1]
            )
        )[0].rate
        for base in (0, 100, 900)
    ]
    assert len(set(rates)) == 1 and rates[0] is not None and rates[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiers", "conversations"])
def test_more_requests_have_the_same_rate(name: str) -> None:
    few, many = (find_workload(name, num_requests=number) for number in (20, 3000))
    assert rate_at(0.9, few, SMALL) == rate_at(0.9, many, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log-uniform", "tiers", "two-users"])
def test_it_is_what_long_backlogs_are_served_at(name: str) -> None:
    """In the mean over seeds, whose own rates differ by more."""
    engine = Engine(max_num_seqs=16, num_blocks=1000)
    workload = find_workload(name, num_requests=600)
    served = []
    for seed in range(4):
        requests = run("fcfs", workload, engine, seed=seed, rate=inf).requests
        last = np.sort(requests.times("last"))
        served.append(0.7 * len(last) / (last[int(0.8 * len(last))] - last[int(0.1 * len(last))]))
    assert capacity_of(workload, engine) == pytest.approx(np.mean(served), rel=0.08)


def test_few_requests_measure_nearly_the_same() -> None:
    workload = find_workload(SHORT)
    exact, rough = (capacity_of(workload, SMALL, num_requests=n) for n in (None, 150))
    assert rough == pytest.approx(exact, rel=0.08)


def test_engines_and_costs_have_capacities_of_their_own() -> None:
    workload = find_workload(SHORT)
    sizes = (8, 4, 8)
    rates = [capacity_of(workload, Engine(max_num_seqs=seats)) for seats in sizes]
    assert rates[0] == rates[2] > 1.5 * rates[1]


def test_a_file_is_served_as_it_is(tmp_path: Path) -> None:
    """A file that is written anew is measured anew, and a file of few requests at all of them."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"2024-05-12 00:00:{n:02d}.0,{10 + n},{5 + n % 3}\n" for n in range(40))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    first = capacity_of(find_workload("azure-csv", path=str(path)), SMALL)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows.replace(",5\n", ",60\n"))
    assert 0 < capacity_of(find_workload("azure-csv", path=str(path)), SMALL) < 0.8 * first


def test_no_policy_serves_more_than_the_demand_allows() -> None:
    workload = find_workload(SHORT, num_requests=300)
    for policy in ("fcfs", "residual-sjf", "sarathi"):
        done = run(policy, workload, SMALL, rate=inf)
        most = most_per_second(done.requests, done.head)
        assert len(done.requests) / np.nanmax(done.requests.times("last")) <= most


def test_demand_adds_up() -> None:
    """Two copies of the same requests demand twice as much; one request, no more than it takes."""
    done = run("fcfs", find_workload(SHORT), SMALL, rate=5.0)
    work = work_of(done.requests, done.head)
    assert work is not None
    assert demand(work) <= float(work.alone().sum())
    half = np.arange(len(work.prompt)) % 2 == 0
    assert demand(work, half) + demand(work, ~half) == pytest.approx(demand(work), rel=0.2)


def test_drawn_sessions_know_what_was_said_before() -> None:
    sample = drawn(find_workload("agents", num_requests=200).source(0, inf))
    assert len(sample.prompt) == 200
    assert sample.known[0] == 0 and (sample.known < sample.prompt).all()
    assert sample.known.sum() > 0.5 * sample.prompt.sum()
    assert drawn(find_workload("log-uniform", num_requests=9).source(0, inf)).known.sum() == 0


def test_an_engine_of_short_requests_ends_long_ones_early() -> None:
    sample = drawn(find_workload(SHORT, num_requests=300).source(0, inf))
    cut = sample.at_most(60)
    assert len(cut.prompt) < 300 and (cut.prompt + cut.output).max() == 60
