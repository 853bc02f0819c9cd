"""The engine beside its simulation: forced lengths, logs as runs, the same plans once more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from engine.sched.predict.profile import read_profile
from policylab.sim.real import run_real
from policylab.sim.recorded import engine_of, read_log, resimulate
from policylab.sim.run import Engine, Run, run
from policylab.sim.workloads import find_workload

WORKLOAD = find_workload(
    "log-uniform(num_requests=150,prompt_tokens=(8,150),output_tokens=(2,60),shared_prefix=64)"
)
TIGHT = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "num_blocks": 70}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Run, Path]]:
    """Real runs and their step logs, by policy and steps in flight."""
    out = tmp_path_factory.mktemp("lab")
    found = {}
    for policy, depth in (("fcfs", 1), ("vtc", 2)):
        log = out / f"{policy}.log"
        engine = Engine(**TIGHT, depth=depth)
        done = run_real(policy, WORKLOAD, engine, seed=3, rate=500.0, step_log=log)
        found[policy, depth] = (done, log)
    return found


@pytest.mark.parametrize("which", [("fcfs", 1), ("vtc", 2)])
def test_a_log_is_a_run_and_runs_again(
    served: dict[tuple[str, int], tuple[Run, Path]], which: tuple[str, int]
) -> None:
    done, path = served[which]
    drawn = [job.num_output for job in WORKLOAD.source(3, 500.0)]
    requests = done.requests
    assert requests.done.all() and requests.counts("num_output").tolist() == drawn
    assert done.gaps[:, 2].sum() == sum(drawn) - len(drawn)
    assert done.totals["num_preemptions"] > 0 and done.totals["prefix_hits"] > 0
    log = read_log(path)
    assert log.run.requests.counts("num_output").tolist() == drawn
    ttft = [r.times("first") - r.times("arrival") for r in (requests, log.run.requests)]
    np.testing.assert_allclose(ttft[0], ttft[1], atol=1e-6)
    outcome, again = resimulate(path, log)
    assert outcome.difference is None and outcome.num_steps == log.run.totals["num_plans"] > 100
    assert list(again.requests.rows()) == list(log.run.requests.rows())
    assert again.gaps.tolist() == log.run.gaps.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 66},
        {"num_blocks": 73},
        {"max_num_batched_tokens": 192},
        {"scheduling_policy": "residual-sjf"},
    ],
)
def test_another_engine_makes_other_plans(
    served: dict[tuple[str, int], tuple[Run, Path]], changes: dict[str, object]
) -> None:
    outcome, _ = resimulate(served["fcfs", 1][1], **changes)
    assert outcome.difference is not None


def test_from_a_log_to_a_profile_to_a_simulation(
    served: dict[tuple[str, int], tuple[Run, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done, path = served["fcfs", 1]
    out = tmp_path / "box.json"
    assert main(["calibrate", str(path), "--out", str(out), "--name", "box"]) == 0
    told = capsys.readouterr().out
    assert "all steps:" in told and "fitted to half of the steps" in told
    profile = read_profile(out)
    assert ("warning: the median error" in told) == (profile.report["all"]["median"] > 0.1)
    engine = engine_of(read_log(path).header, read_profile(out))
    assert (engine.max_num_seqs, engine.num_blocks) == (12, 70)
    again = run("fcfs", WORKLOAD, engine, seed=3, rate=500.0)
    ended = [r.requests.times("last").max() for r in (done, again)]
    assert ended[1] == pytest.approx(ended[0], rel=0.5)  # of one short run on any machine


def test_what_is_no_log_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is not a step log"):
        read_log(tmp_path / "x.log")


def simulate(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    assert main(["simulate", *args]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_another_policy_would_have_done_to_served_traffic(
    served: dict[tuple[str, int], tuple[Run, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done, path = served["fcfs", 1]
    own = simulate(capsys, "--workload", str(path), "--durations", "recorded")
    assert own[0].startswith("identical: ") and own[1].startswith("fcfs on steps-log(")
    assert own[2].startswith("150 requests, 150 done")
    other = simulate(capsys, "--workload", str(path), "--policy", "vtc", "--json")
    assert '"outcomes": {' in "\n".join(other) and '"done": 150' in "\n".join(other)
    assert '"max_num_seqs": 12' in "\n".join(other)  # the log's engine
    done.write(tmp_path / "real.jsonl")
    read = simulate(capsys, "--read", str(tmp_path / "real.jsonl"))
    assert read[0].startswith("fcfs on log-uniform(num_requests=150")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--durations", "recorded"], "needs a step log as --workload, got 'log-uniform'"),
        (["--real"], "--real needs an arrival rate: give --rate"),
        (["--model", "x"], "--model needs a run in real time; add --real"),
        (["--real", "--rate", "1", "--steps"], "--steps needs a simulated run"),
        (["--workload", "nowhere.log"], "workload 'nowhere.log' is neither a known name"),
    ],
)
def test_options_that_do_not_go_together(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *args]) == 2
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1


def test_recorded_times_belong_to_recorded_plans(
    served: dict[tuple[str, int], tuple[Run, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(served["fcfs", 1][1])
    args = ["simulate", "--workload", log, "--durations", "recorded", "--policy", "vtc"]
    assert main(args) == 2
    assert "and --policy cannot be combined" in capsys.readouterr().err


def test_real_time_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, log = tmp_path / "real.jsonl", tmp_path / "steps.log"
    sizes = ["--requests", "20", "--prompt-tokens", "8", "40", "--output-tokens", "2", "10"]
    told = simulate(
        capsys, *sizes, "--real", "--rate", "200", "--out", str(out), "--step-log", str(log)
    )
    assert told[1].startswith("20 requests, 20 done") and Run.read(out).head["kind"] == "real"
    assert read_log(log).run.requests.done.all()
    again = ["--workload", str(log), "--rate", "own"]
    real = simulate(capsys, *again, "--real", "--out", str(tmp_path / "again.jsonl"))
    assert real[1].startswith("20 requests, 20 done")
    plots = ["--beside", str(tmp_path / "again.jsonl"), "--plots", str(tmp_path / "plots")]
    simulated = simulate(capsys, *again, *plots)
    assert "(fcfs can serve " in simulated[0]
    assert (tmp_path / "plots" / "error.csv").is_file()
