"""The highest rate at which a policy keeps limits, where arithmetic says what it is."""

from __future__ import annotations

import json

import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from engine.sim.capacity import GROWS, Search, capacities, highest, limits_of
from engine.sim.compare import Experiment
from engine.sim.promises import slo
from engine.sim.run import Engine
from engine.sim.worker import StepCost
from engine.sim.workloads import find_workload

# Every step takes a hundredth of a second, every request four of them.
STEP, STEPS = 0.01, 4
FIXED = StepCost(fixed=STEP, per_seq=0, per_token=0, per_context=0, per_attention=0)
EVEN = "log-uniform(prompt_tokens=(16,16),output_tokens=(4,4),arrivals='gamma(cv=0)')"
REFUSES = "support.lab_policies.RefusesMost"


def search(limits: str, seats: int = 1, workload: str = EVEN, **fields: object) -> Search:
    told = {
        "policy": "fcfs",
        "workload": find_workload(workload, num_requests=200),
        "engine": Engine(max_num_seqs=seats, cost=FIXED),
        "seed": 0,
        "start": 20.0,
        "limits": tuple(limits_of(limits)),
    }
    return Search(**{**told, **fields})


@pytest.mark.parametrize("start", [12.0, 24.9, 400.0])
@pytest.mark.parametrize(
    ("limits", "seats"), [("ttft.mean<0.5", 1), ("itl.p99<1", 1), ("ttft.p99<0.5,itl.p99<1", 8)]
)
def test_an_even_flow_is_served_up_to_the_seats(limits: str, seats: int, start: float) -> None:
    """A seat serves one request after the other, each in four steps."""
    found = highest(search(limits, seats, start=start))
    assert found.rate == pytest.approx(seats / (STEPS * STEP), rel=0.025)
    assert found.limited_by in (GROWS, *limits.split(","))
    assert found.num_runs <= 16


def test_a_single_server_waits_as_queueing_theory_says() -> None:
    """Poisson arrivals at one seat: of a load r a request waits for r / (2 (1 - r)) of a service in
    the mean (Pollaczek and Khinchine): half a service at a load of a half."""
    one = find_workload("log-uniform(prompt_tokens=(9,9),output_tokens=(1,1))", num_requests=1000)
    what = Experiment(
        policies=["fcfs"],
        workload=one,
        engine=Engine(max_num_seqs=1, cost=FIXED),
        seeds=range(3),
    )
    [found] = capacities(what, limits_of(f"delay.mean<{STEP / 2}"))
    rate, expected = found.rate(0), 0.5 / STEP
    assert rate.value == pytest.approx(expected, rel=0.05)
    assert rate.low <= expected <= rate.high
    assert found.limited_by(0) == "delay.mean<0.005"


def test_the_first_limit_that_breaks_is_named() -> None:
    assert highest(search("itl.p99<0.5")).limited_by == GROWS
    none = highest(search("itl.p99<0.009"))  # less than a step
    assert (none.rate, none.limited_by) == (0.0, "itl.p99<0.009")


def test_who_refuses_has_no_capacity_by_it() -> None:
    """Nine of ten requests are not taken, and nothing else would limit it."""
    found = highest(search("ttft.p99<0.5", policy=REFUSES))
    assert (found.rate, found.limited_by) == (0.0, "refused<0.01")
    asked = highest(search("ttft.p99<0.5,refused<0.95", policy=REFUSES))
    assert asked.rate > 5 / (STEPS * STEP)


def test_a_promise_is_a_limit() -> None:
    found = highest(search("attainment>0.9", slo=tuple(slo("ttft<0.2"))))
    assert found.rate == pytest.approx(25.0, rel=0.05)
    with pytest.raises(ConfigError, match=r"no such figure at 20 requests a second: .*add --slo"):
        highest(search("attainment>0.9"))


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert (
        main(["compare", *args, "--requests", "80", "--output-tokens", "2", "20", "--seeds", "3"])
        == 0
    )
    return capsys.readouterr().out


ASKED = ("fcfs", "support.lab_policies.Copy", "--capacity", "ttft.p99<0.1")


def test_the_table_of_capacities(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*ASKED, "--sweep", "max_num_seqs=2,16")
    lines = told(capsys, *asked).splitlines()
    assert lines[0].endswith(": the highest rate with ttft.p99<0.1, to 1 %, with 3 seeds from 0 on")
    assert [lines[4], lines[9]] == ["max_num_seqs=2", "max_num_seqs=16"]
    assert lines[5].split()[:2] == ["policy", "requests/s"]
    assert lines[6].startswith("fcfs ") and lines[6].split()[-1] == "ttft.p99<0.1"
    assert lines[7].endswith("+0.0 % ±0.0  equal")
    assert float(lines[6].split()[1]) < float(lines[11].split()[1])
    rows = json.loads(told(capsys, *ASKED, "--json"))
    assert [row["rate"] for row in rows[:3]] == [row["rate"] for row in rows[3:6]]
    assert {row["policy"] for row in rows} == {"fcfs", ASKED[1]}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--capacity", "ttft<1"], "--capacity has 'ttft<1', must say of which statistic: ttft."),
        (["--capacity", "ttfb.p99<1"], "figure 'ttfb.p99' is not known"),
        (["--capacity", "ttft.p99<x"], "--capacity has 'ttft.p99<x', must be as in"),
        (["--capacity", "fast"], "--capacity has 'fast', must be as in ttft.p99<1,itl.p99<0.1"),
        (["--capacity", ""], "--capacity is empty"),
        (["--capacity", "ttft.p99<1", "--report", "x"], "--capacity and --report do not go"),
        (["--capacity", "ttft.p99<1", "--requests", "79"], "num_requests is 79, must be 80 or"),
        (["--capacity", "ttft.p99<1", "--seeds", "2"], "--seeds is 2, must be 3 or more"),
        (["--capacity", "ttft.p99<1", "--loads", "0.5"], "--capacity and --loads do not go"),
        (["--capacity", "ttft.p99<1", "--rate", "5"], "--capacity and --rate do not go together"),
        (["--capacity", "ttft.p99<1", "--unpaired"], "--capacity and --unpaired do not go"),
        (["--capacity", "ttft.p99<1", "--workload", "closed-loop"], "so it has no load"),
        (["--capacity", "goodput>1"], "and fcfs on log-uniform(num_requests=90) has no such"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert main(["compare", "fcfs", "--requests", "90", *args]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1 and said in told.err
