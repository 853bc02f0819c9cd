"""Comparisons: equal where nothing differs, undecided where chance could do it, and the rest."""

from __future__ import annotations

import json

import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from engine.sched import Limits, Policy
from engine.sched.policies import POLICIES
from engine.sim.compare import BETTER, EQUAL, NO_MEANS, UNDECIDED, WORSE, Experiment, compare
from engine.sim.experiment import Setting, distinct, measure, with_option
from engine.sim.figures import NAMES
from engine.sim.run import Engine
from engine.sim.workloads import find_workload

SMALL = find_workload("log-uniform(num_requests=120, prompt_tokens=(8, 100))")
ENGINE = Engine(max_num_seqs=8, max_num_batched_tokens=128, num_blocks=120)


class SameAsFirst(POLICIES["fcfs"]):
    """A copy of fcfs."""


class Slow(Policy):
    """Fills steps to a quarter only."""

    def rank(self, req, view):
        return (req.arrival,)

    def limits(self, view):
        return Limits(max_tokens=32)


def test_a_copy_is_equal_in_every_figure() -> None:
    [cell] = compare(
        Experiment(
            policies=["fcfs", SameAsFirst], workload=SMALL, engine=ENGINE, loads=[0.8], seeds=[1, 2]
        )
    )
    for name in NAMES:
        assert cell.difference(1, name).verdict in (EQUAL, NO_MEANS), name
    assert cell.difference(1, "ttft.mean").verdict == EQUAL
    assert cell.names == ["fcfs", "SameAsFirst"] and not cell.collapses()


def test_what_differs_is_told_from_what_may_be_chance() -> None:
    """Pairs see a difference where runs on requests of their own see none."""
    what = Experiment(
        policies=["fcfs", Slow], workload=SMALL, engine=ENGINE, loads=[0.4], seeds=range(6)
    )
    [paired] = compare(what)
    found = paired.difference(1, "ttft.mean")
    assert found.verdict == WORSE and found.by.low > 0 and found.relative > 0
    assert paired.difference(0, "ttft.mean", base=1).verdict == BETTER
    [apart] = compare(
        Experiment(
            policies=["fcfs", SameAsFirst],
            workload=SMALL,
            engine=ENGINE,
            loads=[0.7],
            seeds=range(6),
            is_paired=False,
        )
    )
    assert apart.difference(1, "ttft.mean").verdict == UNDECIDED


def test_an_overloaded_policy_has_no_means_to_compare() -> None:
    workload = find_workload("log-uniform(num_requests=300)")
    [cell] = compare(Experiment(policies=["fcfs", "vtc"], workload=workload, loads=[1.6]))
    assert cell.num_overloaded(0) == 1
    assert cell.difference(1, "ttft.mean").verdict == NO_MEANS
    assert cell.difference(1, "recomputed").num_seeds == 1


def test_the_same_requests_count_for_all_policies() -> None:
    setting = Setting(policies=("fcfs", "residual-sjf", Slow), workload=SMALL, rate=20.0)
    periods = {each.window.num_warmup for each in measure(setting)}
    assert len(periods) == 1


def test_options_are_swept_by_name() -> None:
    workload, engine = with_option("num_blocks", 99, SMALL, ENGINE)
    assert engine.num_blocks == 99 and workload is SMALL
    assert with_option("shared_prefix", 7, SMALL, ENGINE)[0].shared_prefix == 7  # type: ignore
    swept = with_option("max_waiting_requests", 5, SMALL, ENGINE)[1]
    assert swept.scheduler == {"max_waiting_requests": 5}
    with pytest.raises(ConfigError, match="'num_seats' is neither the engine's"):
        with_option("num_seats", 5, SMALL, ENGINE)
    assert distinct(["a", "b", "a", "a"]) == ["a", "b", "a #2", "a #3"]


# The commands

ARGS = ["--requests", "60", "--prompt-tokens", "8", "100", "--output-tokens", "2", "40"]


def said(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main([*args, *ARGS]) == 0
    return capsys.readouterr().out


def test_compare_tells_differences(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "compare", "fcfs", "fcfs", "--seeds", "2", "--loads", "0.5,0.9")
    assert text.count("fcfs can serve") == 2 and "fcfs #2" in text
    assert "ttft.mean" in text and " equal" in text and "undecided" not in text
    sweep = ("--sweep", "max_num_batched_tokens=64,256", "--figures", "e2e.mean")
    text = said(capsys, "compare", "fcfs", "vtc", "--seeds", "2", *sweep)
    assert "max_num_batched_tokens=64;" in text and "max_num_batched_tokens=256;" in text
    rows = json.loads(said(capsys, "compare", "fcfs", "vtc", "--seeds", "2", "--json"))
    assert len(rows) == 4 and {row["seed"] for row in rows} == {0, 1}
    assert rows[0]["e2e.mean"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fcfs", "--seeds", "0"], "--seeds is 0, must be in 1..10000"),
        (["fcfs", "--jobs", "0"], "--jobs is 0, must be in 1.."),
        (["fcfs", "--loads", "much"], "--loads has 'much', must be as in 0.6,0.8,0.9"),
        (["fcfs", "--sweep", "block_size"], "--sweep has 'block_size', must be as in"),
        (["fcfs", "--figures", "ttft"], "figure 'ttft' is not known"),
        (["fcfs", "--slo", "ttft<soon"], "--slo has 'ttft<soon', must be as in ttft<1,tpot<0.1"),
        (["fcfs", "--slo", "speed<1"], "--slo has 'speed<1', must be a limit of one of: ttft"),
        ([], "there is no policy to compare"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *args]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1
