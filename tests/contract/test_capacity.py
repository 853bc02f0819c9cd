"""The highest rate at which a policy keeps limits, where arithmetic says what it is."""

from __future__ import annotations

import json
from math import isnan, nan
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from policylab.cli.capacity import described, rows_of
from policylab.sim.capacity import (
    FULL,
    GROWS,
    Capacities,
    Highest,
    RateSearch,
    highest,
    limits_of,
)
from policylab.sim.estimate import mean_over
from policylab.sim.promises import slo
from policylab.sim.run import Engine
from policylab.sim.worker import StepCost
from policylab.sim.workloads import find_workload

# Every step takes a hundredth of a second, every request four of them.
STEP, STEPS = 0.01, 4
FIXED = StepCost(fixed=STEP, per_seq=0, per_token=0, per_context=0, per_attention=0)
EVEN = "log-uniform(prompt_tokens=(16,16),output_tokens=(4,4),arrivals='gamma(cv=0)')"
TWO = "two-users(flood=1,lengths='log-uniform(prompt=(16,64),output=(2,8))')"
STARVES = "support.lab_policies.LongLast"
REFUSES = "support.lab_policies.RefusesMost"


def search(limits: str, seats: int = 1, workload: str = EVEN, **fields: object) -> RateSearch:
    size = {} if "num_requests" in workload else {"num_requests": 200}
    told = {
        "policy": "fcfs",
        "workload": find_workload(workload, **size),
        "engine": Engine(max_num_seqs=seats, cost=FIXED),
        "seed": 0,
        "start": 20.0,
        "limits": tuple(limits_of(limits)),
        "least": 200,
    }
    return RateSearch(**{**told, **fields})


SLOW_STARTS = [pytest.param(start, marks=pytest.mark.slow) for start in (12.0, 400.0)]


@pytest.mark.parametrize("start", [24.9, *SLOW_STARTS])
@pytest.mark.parametrize(
    ("limits", "seats"),
    [
        pytest.param("ttft.mean<0.5", 1, marks=pytest.mark.slow),
        pytest.param("itl.p99<1", 1, marks=pytest.mark.slow),
        ("ttft.p99<0.5,itl.p99<1", 8),
    ],
)
def test_an_even_flow_is_served_up_to_the_seats(limits: str, seats: int, start: float) -> None:
    """A seat serves one request after the other, each in four steps."""
    found = highest(search(limits, seats, start=start))
    assert found.rate == pytest.approx(seats / (STEPS * STEP), rel=0.025)
    assert found.limited_by in (GROWS, FULL, *limits.split(","))
    assert found.rate <= 1.01 * seats / (STEPS * STEP)
    assert found.num_runs <= 16 and found.num_requests == 200


@pytest.mark.slow
def test_a_single_server_waits_as_queueing_theory_says() -> None:
    """Poisson arrivals at one seat: of a load r a request waits for r / (2 (1 - r)) of a service in
    the mean (Pollaczek and Khinchine): half a service at a load of a half."""
    one = "log-uniform(prompt_tokens=(9,9),output_tokens=(1,1),num_requests=400)"
    limit = f"delay.mean<{STEP / 2}"
    told = {"workload": one, "start": 50.0, "least": 400}
    found = [highest(search(limit, seed=seed, **told)) for seed in range(6)]
    rate, expected = mean_over([each.rate for each in found]), 0.5 / STEP
    assert rate.value == pytest.approx(expected, rel=0.05)
    assert rate.low <= expected <= rate.high
    assert found[0].limited_by == "delay.mean<0.005"


@pytest.mark.slow
def test_the_first_limit_that_breaks_is_named() -> None:
    assert highest(search("itl.p99<0.5")).limited_by in (GROWS, FULL)
    none = highest(search("itl.p99<0.009"))  # less than a step
    assert (none.rate, none.limited_by) == (0.0, "itl.p99<0.009")


@pytest.mark.slow
def test_who_refuses_has_no_capacity_by_it() -> None:
    """Nine of ten requests are not taken, and nothing else would limit it."""
    found = highest(search("ttft.p99<0.5", policy=REFUSES))
    assert (found.rate, found.limited_by) == (0.0, "refused<0.01")
    asked = highest(search("ttft.p99<0.5,refused<0.95", policy=REFUSES))
    assert asked.rate > 5 / (STEPS * STEP)


def test_a_promise_is_a_limit() -> None:
    found = highest(search("attainment>0.9", slo=tuple(slo("ttft<0.2"))))
    assert found.rate == pytest.approx(25.0, rel=0.05)
    with pytest.raises(ConfigError, match=r"no such figure at 20 requests per second: .*add --slo"):
        highest(search("attainment>0.9"))


SHORT = ("--requests", "80", "--workload", EVEN)


def told(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> str:
    assert main(["compare", *args, *SHORT, "--seeds", "3"]) == status
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_table_of_capacities(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", "fcfs", "--capacity", "ttft.p99<0.1", "--sweep", "max_num_seqs=2,16"]
    assert main([*asked, *SHORT, "--seeds", "3"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].endswith(": the highest rate with ttft.p99<0.1, to 1 %, with 3 seeds from 0 on")
    assert lines[1] == "runs of 1000 requests or more, each answer checked with 4 times as many"
    assert [lines[5], lines[9]] == ["max_num_seqs=2", "max_num_seqs=16"]
    assert lines[6].split()[:2] == ["policy", "requests/s"]
    assert lines[7].startswith("fcfs ") and float(lines[7].split()[1]) < float(lines[11].split()[1])
    progress = shown.err.splitlines()
    assert len(progress) == 6 and progress[0].startswith("1 of 6 searches: fcfs, seed 0: ")
    assert progress[-1].startswith("6 of 6 searches: fcfs, seed 2: ")


def made(*columns: list[float], **fields: object) -> Capacities:
    """Capacities of policies a, b, ...; NaN: refused."""
    found = [
        [
            Highest(
                rate=rate,
                limited_by="ttft.p99<1",
                num_runs=5,
                num_requests=1000,
                refused="no answer, as it is so" if rate != rate else "",
            )
            for rate in column
        ]
        for column in columns
    ]
    return Capacities(setting="", names=list("abc"[: len(columns)]), found=found, **fields)


def test_a_cell_is_of_all_seeds_or_says_of_how_many() -> None:
    lines = list(described(made([1.0, 2.0, 3.0], [1.0, nan, 3.0], [nan, nan, nan])))
    assert lines[1].split()[:4] == ["a", "2.00", "±2.48", "1.00"]
    assert lines[2].split()[:5] == ["b", "2", "of", "3", "-"] and lines[2].endswith("-  no means")
    assert lines[3].split()[:3] == ["c", "-", "-"]
    assert lines[4:] == ["b: no answer, as it is so", *["c: no answer, as it is so"] * 3]
    same = list(described(made([1.0, 2.0], [1.0, 2.0])))
    assert same[2].endswith("+0.0 % ±0.0  equal")
    rows = rows_of(made([1.0, nan]), [7, 8])
    assert [(row["seed"], row["num_seeds"], row["num_answers"]) for row in rows] == [
        *((7, 2, 1), (8, 2, 1)),
    ]
    [row] = rows_of(made(left_out={"x": "it raised"}), [0])
    assert row["policy"] == "" and row["left_out"] == "x: it raised"


@pytest.mark.slow
def test_a_policy_that_is_not_its_own_has_no_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    broken = "support.lab_policies.Broken"
    rows = json.loads(
        told(capsys, "fcfs", broken, "--capacity", "ttft.p99<0.1", "--json", status=1)
    )
    assert [row["policy"] for row in rows] == ["fcfs"] * 3
    assert all(row["left_out"].startswith(f"{broken}: 4 answers were given by") for row in rows)
    assert {row["num_requests"] for row in rows} <= {1000, 4000}
    assert main(["compare", broken, "--capacity", "ttft.p99<0.1", *SHORT, "--seeds", "3"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{broken} is left out, since it has no figures: ")


@pytest.mark.slow
def test_few_requests_have_the_capacity_of_many() -> None:
    """Fewer than a search begins with are as many as that."""
    few, many = (
        highest(search("ttft.p99<0.3", 4, f"{TWO[:-1]},num_requests={number})"))
        for number in (40, 200)
    )
    assert few == many and few.num_requests >= 200


@pytest.mark.slow
def test_a_starved_class_is_no_capacity() -> None:
    """The long prompts wait for ever above what all of them need, and the queue hardly grows."""
    served = highest(search("ttft.p50<1", 4, workload=TWO, policy=STARVES, least=400))
    assert served.rate <= 1.05 * highest(search("ttft.p50<1", 4, workload=TWO, least=400)).rate


@pytest.mark.parametrize(
    ("seed", "num_requests", "refused"),
    [
        (3, 100, ""),
        pytest.param(2, 400, "", marks=pytest.mark.slow),
        pytest.param(
            *(1, 400, "limits hold for 400 requests, not 1600 (ttft.p99<0.3); use --requests 1600"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_short_runs_are_made_longer_or_have_no_answer(
    seed: int, num_requests: int, refused: str
) -> None:
    """What some requests keep, four times as many must keep, too: a tail shows in long runs."""
    chance = f"{EVEN.replace('cv=0', 'cv=1')[:-1]},num_requests=100)"
    found = highest(search("ttft.p99<0.3", least=100, workload=chance, seed=seed))
    assert found.num_requests == num_requests and refused in found.refused
    assert isnan(found.rate) if refused else 15 < found.rate < 25.5


def test_a_file_is_too_short_or_is_served_in_a_quarter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"2024-05-12 00:{n // 60:02d}:{n % 60:02d}.0,9,2\n" for n in range(1000))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    asked = ["compare", "fcfs", "--seeds", "3", "--capacity", "ttft.p99<1", "--workload"]
    assert main([*asked, f"azure-csv(path={str(path)!r},num_requests=999)"]) == 2
    assert "has 999 requests, must have 1000 or more for --capacity" in capsys.readouterr().err
    assert main([*asked, f"azure-csv(path={str(path)!r})", "--json"]) == 0
    assert {row["num_requests"] for row in json.loads(capsys.readouterr().out)} == {250}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--capacity", "ttft<1"], "--capacity has 'ttft<1', must name a statistic: ttft."),
        (["--capacity", ""], "--capacity is empty"),
        (["--capacity", "ttft.p99<1", "--report", "x"], "--capacity and --report cannot be"),
        (["--capacity", "ttft.p99<1", "--seeds", "2"], "--seeds is 2, must be 3 or more"),
        (["--capacity", "ttft.p99<1", "--loads", "0.5"], "--capacity and --loads cannot be"),
        (["--capacity", "ttft.p99<1", "--rate", "5"], "--capacity and --rate cannot be combined"),
        (["--capacity", "ttft.p99<1", "--unpaired"], "--capacity and --unpaired cannot be"),
        (["--capacity", "ttft.p99<1", "--workload", "closed-loop"], "so it has no load"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert main(["compare", "fcfs", "--requests", "90", *args]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1 and said in told.err
