"""Comparisons: equal where nothing differs, undecided where chance could do it, and the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from engine.sched import Limits, Policy
from engine.sched.policies import POLICIES
from engine.sim.capacity import Search, capacities, conditions, highest_rate
from engine.sim.compare import BETTER, EQUAL, NO_MEANS, UNDECIDED, WORSE, Experiment, compare
from engine.sim.experiment import Setting, distinct, measure, with_option
from engine.sim.figures import NAMES
from engine.sim.job import Job, Span
from engine.sim.run import Engine
from engine.sim.worker import StepCost
from engine.sim.workloads import Source, Workload, find_workload
from engine.sim.workloads.log_uniform import LogUniform
from engine.sim.worst import Hunt, Place

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


# Capacity


@dataclass(frozen=True, kw_only=True)
class Even(LogUniform):
    """Requests of 8 and 10 tokens at even gaps."""

    kind = "even"

    def source(self, seed: int, rate: float | None = None) -> Source:
        return Source(self._jobs(rate or 1.0))

    def _jobs(self, rate: float) -> Iterator[Job]:
        for number in range(self.num_requests):
            prompt = (Span(f"p{number}", 8),)
            yield Job(request_id=f"r{number}", arrival=number / rate, prompt=prompt, num_output=10)


FIXED = StepCost(fixed=0.1, per_seq=0.0, per_token=0.0, per_context=0.0, per_attention=0.0)


def test_the_limit_of_a_workload_of_fixed_cost_is_found() -> None:
    """Sixteen seats, ten steps of a tenth of a second each: 16 requests a second, whatever comes.
    Above it a run of 100 s would let the last wait for a second for each percent."""
    engine = Engine(max_num_seqs=16, cost=FIXED)
    workload = Even(num_requests=1600)
    rate = highest_rate(
        Search(policy="fcfs", workload=workload, limits=conditions("ttft.p99<1"), engine=engine)
    )
    assert rate == pytest.approx(16.0, rel=0.025)


def test_capacities_of_policies_and_mistakes() -> None:
    limits = conditions("ttft.p99<0.5, attainment>0.5")
    slo = conditions("ttft.p99<1") and [limits[0]._replace(figure="ttft", value=1.0)]
    found = capacities(["fcfs", SameAsFirst], SMALL, limits, ENGINE, seeds=range(3), slo=slo)
    assert found[0].by_seed == found[1].by_seed and min(found[0].by_seed) > 0
    assert found[0].mean.low < found[0].mean.value
    with pytest.raises(ConfigError, match="a capacity needs 3 or more"):
        capacities(["fcfs"], SMALL, limits, ENGINE, seeds=[1])
    with pytest.raises(ConfigError, match="attainment and goodput want promises"):
        capacities(["fcfs"], SMALL, conditions("attainment>0.9"), ENGINE)
    with pytest.raises(ConfigError, match="has no rate to be searched"):
        capacities(["fcfs"], find_workload("closed-loop"), limits, ENGINE)
    with pytest.raises(ConfigError, match="figure 'ttft' is not known"):
        conditions("ttft<1")


# The worst place


class Planted(Policy):
    """As fcfs, but where the budget of a step is small: there it wastes most of it."""

    def rank(self, req, view):
        return (req.arrival,)

    def limits(self, view):
        return Limits(max_tokens=8) if view.config.max_num_batched_tokens < 200 else Limits()


TINY = LogUniform(num_requests=40, prompt_tokens=(8, 100), output_tokens=(2, 20))


def test_a_planted_bad_case_is_found_and_made_small() -> None:
    start = Place(workload=TINY, engine=Engine(), load=0.7)
    found = Hunt(Planted, "fcfs", seed=1, seconds=300.0).search(start, max_tries=30)
    assert found.start_ratio == 1.0 and found.ratio > 2.0
    assert found.place.engine.max_num_batched_tokens < 200
    assert "max_num_batched_tokens" in found.changed and len(found.changed) <= 4
    assert found.place.workload.num_requests <= 40


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


def test_compare_finds_capacities_and_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "compare", "fcfs", "fcfs", "--seeds", "3", "--capacity", "ttft.p99<0.03")
    assert "requests a second, ttft.p99<0.03" in text and text.rstrip().endswith("equal")
    text = said(capsys, "compare", "--worst", "vtc,fcfs", "--seconds", "1")
    assert "times as bad as that of fcfs" in text


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
        (["fcfs", "--capacity", "ttft.p99<x"], "--capacity has 'ttft.p99<x', must be as in"),
        (["--worst", "fcfs"], "--worst has 'fcfs', must be two policies"),
        ([], "there is no policy to compare"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *args]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1


# Chance


def called_different(num_comparisons: int, num_seeds: int, workload: Workload) -> int:
    """How many comparisons of fcfs with itself on other requests call its mean TTFT another."""
    called = 0
    for number in range(num_comparisons):
        first = 1000 + number * num_seeds
        [cell] = compare(
            Experiment(
                policies=["fcfs", "fcfs"],
                workload=workload,
                engine=ENGINE,
                rate=14.0,
                seeds=range(first, first + num_seeds),
                is_paired=False,
            )
        )
        called += cell.difference(1, "ttft.mean").verdict in (BETTER, WORSE)
    return called


def test_chance_alone_is_seldom_called_a_difference() -> None:
    workload = find_workload("log-uniform(num_requests=80, prompt_tokens=(8, 100))")
    assert called_different(10, 4, workload) <= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_a_hundred_comparisons_with_itself_ten_at_most_are_called_different() -> None:
    workload = find_workload("log-uniform(num_requests=200, prompt_tokens=(8, 100))")
    assert called_different(100, 8, workload) <= 10
