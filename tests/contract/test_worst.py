"""The search for where a policy does worst: it finds what was planted, and shows it."""

from __future__ import annotations

import shlex
from math import inf, log
from typing import Any

import pytest
from support.lab_policies import FEW, LONG

from engine.cli.main import main, parse
from engine.errors import ConfigError
from policylab.cli.worst import command
from policylab.sim.run import Engine
from policylab.sim.workloads import find_workload
from policylab.sim.worst import KNOBS, Found, Hunt, Score, WorstCase, choice, find_worst, score

PLANTED, NEVER = "support.lab_policies.Planted", "support.lab_policies.NeverEnds"
SMALL = "log-uniform(num_requests=30,output_tokens=(1,16))"


def hunt(policy: str = PLANTED, **fields: Any) -> Hunt:
    start = WorstCase(workload=find_workload(SMALL), engine=Engine(), load=0.9, seeds=(0, 1))
    told = {"other": "fcfs", "figure": "ttft.mean", "start": start, "max_tries": 70.0}
    # Time stands still: tries alone end the search, and it is the same everywhere.
    return Hunt(policy=policy, **{**told, "clock": lambda: 0.0, **fields})


@pytest.fixture(scope="module")
def found() -> Found:
    return find_worst(hunt(pinned=frozenset({"output_tokens"})))


@pytest.mark.slow
def test_a_planted_bad_case_is_found(found: Found) -> None:
    """It shows where seats are few and some prompts long, and nowhere else."""
    case = found.case
    assert case.engine.max_num_seqs <= FEW and case.workload.max_prompt >= LONG
    assert found.score.times > 1.25 and found.score.ours > 1.2 * found.score.theirs
    assert score(hunt(), hunt().start).worse == 0.0
    assert case.workload.output_tokens == (1, 16)


@pytest.mark.slow
def test_a_case_is_made_simple(found: Found) -> None:
    """Little else is turned."""
    turned = [name for name in KNOBS if choice(found.case, name) != choice(hunt().start, name)]
    assert "max_num_seqs" in turned and len(turned) <= 4


def test_requests_are_left_out() -> None:
    workload = find_workload(SMALL, num_requests=30)
    start = WorstCase(workload=workload, engine=Engine(max_num_seqs=2), load=0.9, seeds=(0, 1))
    small = find_worst(hunt(start=start, pinned=frozenset(KNOBS)))
    assert small.case.workload.num_requests < 30
    assert small.score.worse >= 0.8 * score(hunt(), start).worse > 0


@pytest.mark.slow
def test_the_command_line_shows_the_same_case(
    found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(parse(["compare", PLANTED, "fcfs", "--worst"]), found.case)
    name, *words = shlex.split(line)
    assert name == "metronome" and main(words) == 0
    shown = capsys.readouterr().out.splitlines()
    row = next(each for each in shown if each.startswith("ttft.mean")).split()
    assert row[1] == f"{found.score.theirs:.4f}"
    assert row[3] == f"{found.score.ours:.4f}"
    assert shown[1].startswith("whole runs: ")


def test_the_same_seed_searches_the_same() -> None:
    few = {"max_tries": 4.0}
    assert find_worst(hunt(**few)) == find_worst(hunt(**few))


def test_time_is_up_when_it_is() -> None:
    times = iter([0.0, *[6.9] * 3, *[7.1] * 100])
    assert find_worst(hunt(seconds=10.0, clock=lambda: next(times))).num_tries <= 5


def test_who_never_ends_is_the_worst_of_all() -> None:
    worst = find_worst(hunt(NEVER, max_tries=3.0))
    assert worst.score.worse == inf and "never lets its requests end" in worst.score.why
    assert worst.score.times == inf


def test_more_of_what_is_wanted_is_better() -> None:
    case = hunt().start
    by = [score(hunt("residual-sjf", figure=name), case) for name in ("e2e.mean", "goodput")]
    assert by[0].ours != by[0].theirs
    assert by[1] == Score(worse=-inf)  # nothing was promised, so there is no such figure
    times = score(hunt("support.lab_policies.RefusesMost", figure="requests_per_second"), case)
    assert times.worse == pytest.approx(log(times.theirs / times.ours), abs=0.1) and times.worse > 1


def test_a_search_in_which_nothing_can_run() -> None:
    start = WorstCase(
        workload=find_workload(SMALL), engine=Engine(num_blocks=2), load=0.9, seeds=(0, 1)
    )
    with pytest.raises(ConfigError, match="no case could be run in 60 s; give more --seconds"):
        find_worst(hunt(start=start, pinned=frozenset({"num_blocks"}), max_tries=9.0))


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", PLANTED, "fcfs", "--worst", "--max-num-seqs", "2", "--requests", "20"]
    assert main([*asked, "--output-tokens", "1", "8", "--seconds", "0.3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"the worst case of {PLANTED} relative to fcfs by ttft.mean: ")
    assert " times as bad: " in lines[1] and lines[-1].startswith("metronome compare fcfs ")
    assert "--max-num-seqs 2 " in lines[-1] and "output_tokens=(1, 8)" in lines[-1]
    assert any(line.startswith("with 5 other seeds: ") for line in lines)
    asked = ["compare", "--worst", "fcfs,fcfs", "--requests", "20", "--seconds", "0.1"]
    assert main(asked) == 0
    assert capsys.readouterr().out.startswith("fcfs was never worse than fcfs by ttft.mean: ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fcfs"], "--worst needs two policies, got 1"),
        (["fcfs", "lpm", "vtc", "--worst"], "got 3"),
        ([], "got 0; give them as in vtc,fcfs"),
        (["fcfs", "lpm", "--seconds", "0"], "--seconds is 0, must be above 0"),
        (["fcfs", "lpm", "--rate", "5"], "--worst and --rate cannot be combined"),
        (["fcfs", "lpm", "--capacity", "ttft.p99<1"], "--worst and --capacity cannot be combined"),
        (["fcfs", "lpm", "--loads", "0.5,0.9"], "--loads has 2 loads, must have at most one"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert main(["compare", *args, *([] if "--worst" in args else ["--worst"])]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1 and said in told.err
