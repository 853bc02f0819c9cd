"""Policies side by side: the same requests for each, and what is more than chance."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from math import inf, isnan, nan

import pytest
from support.lab_policies import Copy

from engine.cli.main import main
from engine.errors import ConfigError
from engine.sched import Limits, Policy
from policylab.cli.compare import described
from policylab.cli.policies import table
from policylab.sim.compare import (
    BETTER,
    EQUAL,
    NO_MEANS,
    UNDECIDED,
    WORSE,
    Cell,
    Experiment,
    compare,
)
from policylab.sim.experiment import distinct, with_option
from policylab.sim.figures import NAMES, figures
from policylab.sim.report import points_from
from policylab.sim.report.ranking import rankings
from policylab.sim.run import Engine, PolicyVariant, run
from policylab.sim.workloads import find_workload

SMALL = find_workload("log-uniform(num_requests=60,output_tokens=(2,64))")
COPY = "support.lab_policies.Copy"


def small(*policies: object, **fields: object) -> Experiment:
    """A comparison at 0.7 of what fcfs can serve, which is not measured again for each."""
    rate = None if "loads" in fields else 83.0
    options = {"workload": SMALL, "rate": rate, "seeds": range(3)}
    return Experiment(policies=policies, **{**options, **fields})


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["compare", *args, "--requests", "60", "--output-tokens", "2", "64"]) == 0
    return capsys.readouterr().out


def mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that is said of it."""
    assert main(["compare", *args]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err.removeprefix("metronome: error: ").strip()


def made_cell(ours: list[float], theirs: list[float], **fields: object) -> Cell:
    """A cell whose runs differ in the time to the first token alone."""
    whole = figures(run("fcfs", replace(SMALL, num_requests=5), rate=1.0))

    def column(values: list[float]) -> list:
        latencies = [whole.latency["ttft.mean"]._replace(value=value) for value in values]
        return [
            replace(whole, latency={} if isnan(each.value) else {"ttft.mean": each})
            for each in latencies
        ]

    told = {"load": 0.7, "rate": 1.0, "capacity": None, "setting": ""}
    columns = [column(theirs), column(ours)]
    return Cell(names=["fcfs", "x"], figures=columns, **{**told, **fields})


def verdict(ours: list[float], theirs: list[float], **fields: object) -> str:
    return made_cell(ours, theirs, **fields).difference(1, "ttft.mean").verdict


def test_a_policy_and_its_copy_are_equal_in_every_figure() -> None:
    [cell] = compare(small("fcfs", Copy, PolicyVariant(COPY, {}), rate=106.5))
    assert cell.names == ["fcfs", "Copy", f"{COPY}()"]
    for place in (1, 2):
        assert {cell.difference(place, name).verdict for name in NAMES} <= {EQUAL, NO_MEANS}
        for ours, theirs in zip(cell.figures[place], cell.figures[0], strict=True):
            same = {"policy": "", "hook_seconds": 0.0}
            assert repr(replace(ours, **same)) == repr(replace(theirs, **same))


def test_all_policies_get_the_same_requests_unless_asked_otherwise() -> None:
    [paired] = compare(small("fcfs", "residual-sjf"))
    assert {paired.difference(1, "num_steps").num_seeds} == {3}
    for ours, theirs in zip(*paired.figures, strict=True):
        assert ours.bounds == theirs.bounds and ours.window.num_warmup == theirs.window.num_warmup
    [unpaired] = compare(small("fcfs", "fcfs", is_paired=False))
    assert unpaired.names == ["fcfs", "fcfs #2"]
    for ours, theirs in zip(*unpaired.figures, strict=True):
        assert ours.bounds != theirs.bounds
    assert unpaired.difference(1, "ttft.mean").verdict == UNDECIDED


class Slow(Policy):
    """Fills steps to a quarter only."""

    def rank(self, req, view):
        return (req.arrival,)

    def limits(self, view):
        return Limits(max_tokens=32)


def test_pairs_see_what_is_worse() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=128, num_blocks=120)
    [cell] = compare(small("fcfs", Slow, engine=engine, rate=16.0, seeds=range(5)))
    found = cell.difference(1, "ttft.mean")
    assert found.verdict == WORSE and found.by.low > 0 and found.relative > 0
    assert cell.difference(0, "ttft.mean", base=1).verdict == BETTER


def test_a_difference_is_that_of_the_pairs() -> None:
    """A tenth less with every seed is sure, however much the seeds differ from each other."""
    theirs, ours = [1.0, 2.0, 4.0, 8.0], [0.9, 1.9, 3.9, 7.9]
    found = made_cell(ours, theirs).difference(1, "ttft.mean")
    assert found.verdict == BETTER and found.num_seeds == 4
    assert found.by.value == pytest.approx(-0.1) and found.by.high < 0
    assert found.relative == pytest.approx(-0.1 / 3.75)
    assert verdict(theirs, ours) == WORSE
    assert verdict(ours, theirs, is_paired=False) == UNDECIDED


def test_an_interval_that_holds_nought_decides_nothing() -> None:
    assert verdict([1.1, 0.9, 1.0], [1.0, 1.0, 1.0]) == UNDECIDED
    assert verdict([1.1], [1.0]) == UNDECIDED  # one seed has no interval
    assert verdict([1.0, 2.0], [1.0, 2.0]) == EQUAL


def test_means_of_a_chosen_few_seeds_are_not_compared() -> None:
    assert verdict([1.0, 2.0, 3.0], [1.1, 2.1, 3.1]) == BETTER
    assert verdict([nan, 1.0, 2.0, 3.0], [0.5, 1.1, 2.1, 3.1]) == NO_MEANS
    assert verdict([1.0, 2.0], [1.1, nan], is_paired=False) == NO_MEANS
    cell = made_cell([nan, 1.0, 2.0, 3.0], [9.0, 1.1, 2.1, 3.1])
    found = cell.difference(1, "ttft.mean")
    assert found.num_seeds == 3 and isnan(found.ours.value) and isnan(found.by.value)
    assert isnan(cell.over_seeds(1, "ttft.mean").value) and cell.num_with(1, "ttft.mean") == 3
    assert cell.over_seeds(0, "ttft.mean").value == pytest.approx(3.825)


def test_a_cell_says_how_many_seeds_have_a_mean() -> None:
    cell = made_cell([nan, 1.0, 2.0, 3.0], [9.0, 1.1, 2.1, 3.1])
    [_, _, row, *_] = described(cell, ["ttft.mean"])
    assert row.split()[3:] == ["3", "of", "4", "-", "no", "means"]
    [_, fcfs, x] = table(cell)
    assert fcfs.split()[1] == "3.825" and x.split()[1:4] == ["3", "of", "4"]
    [_, ours] = points_from([cell])
    assert ours.seeds_with("ttft.mean") == "3 of 4" and isnan(ours.value("ttft.mean"))
    [_, *rows] = rankings(points_from([cell]))
    [ranked] = [row[1] for row in rows if row[0] == "mean time to first token"]
    assert "x: 3 of 4" in ranked or "x" not in ranked


def test_more_of_what_is_wanted_is_better() -> None:
    cell = made_cell([1.0, 1.0], [2.0, 2.0])
    assert cell.difference(1, "tokens_per_second").verdict == EQUAL
    columns = [
        [replace(each, tokens_per_second=rate + each.num_steps) for each in column]
        for rate, column in zip((1.0, 2.0), cell.figures, strict=True)
    ]
    assert replace(cell, figures=columns).difference(1, "tokens_per_second").verdict == BETTER


def test_loads_are_of_one_capacity_and_settings_have_their_own() -> None:
    cells = compare(small("fcfs", loads=[0.5, 1.0], sweep=("max_num_seqs", [4, 16]), seeds=[0]))
    assert [(cell.load, cell.setting) for cell in cells] == [
        *((0.5, "max_num_seqs=4"), (1.0, "max_num_seqs=4")),
        *((0.5, "max_num_seqs=16"), (1.0, "max_num_seqs=16")),
    ]
    few, _, many, _ = cells
    assert few.capacity == cells[1].capacity and few.capacity < many.capacity
    assert few.rate == pytest.approx(0.5 * few.capacity)


def test_options_of_engine_workload_and_scheduler_are_swept() -> None:
    engine = Engine()
    assert with_option("num_blocks", 7, SMALL, engine)[1].num_blocks == 7
    assert with_option("shared_prefix", 7, SMALL, engine)[0].shared_prefix == 7
    swept = with_option("max_waiting_requests", 7, SMALL, engine)[1]
    assert swept.scheduler == {"max_waiting_requests": 7}


def test_columns_have_names_of_their_own() -> None:
    assert distinct(["a", "b", "a", "a"]) == ["a", "b", "a #2", "a #3"]


def test_the_table_says_which_differences_are_chance(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "fcfs", COPY, "--seeds", "3", "--figures", "ttft.mean,e2e.p99").split("\n")
    assert lines[0].startswith("log-uniform(num_requests=60, output_tokens=(2, 64)): 3 seeds from")
    assert lines[0].endswith("from 0 on, the same requests for each policy")
    assert lines[4].startswith("load 0.9: ") and "fcfs can serve" in lines[4]
    assert lines[5].split() == ["fcfs", COPY, "difference"]
    name, _, _, _, _, *difference = lines[6].split()
    assert name == "ttft.mean" and difference == ["+0.0", "%", "±0.0", "equal"]
    assert lines[7].startswith("e2e.p99 ")


def test_the_policies_of_a_workload_that_is_overloaded_have_no_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = ["--requests", "200", "--output-tokens", "2", "64"]
    assert main(["compare", "fcfs", COPY, *short, "--seeds", "2", "--loads", "2"]) == 0
    out = capsys.readouterr().out
    said = "overloaded with 2 of 2 seeds, as its queue grows to the end: its latencies have no"
    assert f"fcfs: {said} means" in out
    assert "ttft.mean" not in out and "tokens_per_second" in out


def test_figures_are_written_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("fcfs", "lpm", "--seeds", "2", "--sweep", "max_num_seqs=4,8", "--rate", "20")
    rows = json.loads(told(capsys, *asked, "--json"))
    assert [(row["policy"], row["seed"], row["setting"]) for row in rows] == [
        (policy, seed, f"max_num_seqs={seats}")
        for seats in (4, 8)
        for policy in ("fcfs", "lpm")
        for seed in (0, 1)
    ]
    assert set(NAMES) < set(rows[0])
    again = list(csv.DictReader(io.StringIO(told(capsys, *asked, "--csv"))))
    assert [float(row["makespan"]) for row in again] == [row["makespan"] for row in rows]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fcsf"], "fcsf"),
        (
            ["edf(deadline"],
            "POLICY has 'edf(deadline', must be a name, optionally with options as in",
        ),
        (["fcfs", "--seeds", "0"], "--seeds is 0, must be in 1..10000"),
        (["fcfs", "--jobs", "1000"], "--jobs is 1000, must be in 1.."),
        (["fcfs", "--loads", "high"], "--loads has 'high', must be as in 0.6,0.8,0.9"),
        (["fcfs", "--rate", "0"], "--rate is 0, must be above 0"),
        (["fcfs", "--loads", "0.5", "--rate", "3"], "--loads and --rate both set"),
        (
            ["fcfs", "--sweep", "seats"],
            "--sweep has 'seats', must be as in max_num_batched_tokens=",
        ),
        (["fcfs", "--sweep", "seats=1,2"], "option 'seats' is unknown to the engine ("),
        (["fcfs", "--sweep", "scheduling_policy=lpm"], "belongs to the policy; write it after"),
        (["fcfs", "--sweep", "enable_prefix_caching=maybe"], "is 'maybe', must be True or False"),
        (["fcfs", "--sweep", "users=5"], "users cannot be 5"),
        (["fcfs", "--sweep", "depth=two"], "depth is 'two', must be 1 or more"),
        (["fcfs", "--sweep", "prompt_tokens=5"], "prompt_tokens is 5, must be two numbers"),
        (["fcfs", "--figures", "ttft"], "figure 'ttft' is not known; there are: ttft.mean"),
        (
            ["fcfs", "--workload", "closed-loop", "--loads", "0.5"],
            "so it has no load; leave --load",
        ),
        (["fcfs", "--json", "--csv"], "--json and --csv both set the output format"),
        (["fcfs", "--num-kv-blocks", "2"], "this engine can serve no request of"),
        (["fcfs", "--cost", "no.json"], "--cost 'no.json' cannot be read"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert said in mistake(capsys, *args)


def test_no_policy_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="there is no policy to compare; name one"):
        compare(small())


def called_different(number: int, num_seeds: int, num_requests: int) -> int:
    """How many of ``number`` comparisons of fcfs with itself report a difference."""
    workload = find_workload(f"log-uniform(num_requests={num_requests},output_tokens=(4,64))")
    found = 0
    for place in range(number):
        seeds = range(place * num_seeds, (place + 1) * num_seeds)
        [cell] = compare(
            small(
                "fcfs",
                "fcfs",
                workload=workload,
                seeds=seeds,
                rate=20.0,
                is_paired=False,
            )
        )
        found += cell.difference(1, "ttft.mean").verdict in (BETTER, WORSE)
    return found


def test_chance_is_seldom_called_a_difference() -> None:
    """Nineteen in twenty intervals hold 0; three and more of six miss it once in 450 times."""
    assert called_different(6, num_seeds=4, num_requests=24) <= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_chance_is_called_a_difference_in_at_most_a_tenth_of_the_cases() -> None:
    assert called_different(100, num_seeds=5, num_requests=200) <= 10


def test_an_infinite_rate_has_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ttft.mean" in told(capsys, "fcfs", "lpm", "--seeds", "2", "--rate", "inf")
    [cell] = compare(small("fcfs", rate=inf, seeds=[0]))
    assert cell.figures[0][0].window.state == "at once"
