"""A policy that was switched off, or answered for by default once, has no figures anywhere."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.errors import PolicyError
from policylab.sim.compare import Experiment, compare
from policylab.sim.figures import figures
from policylab.sim.report import read_report
from policylab.sim.run import Run, run
from policylab.sim.workloads import find_workload

WHERE = "support.lab_policies."
WORKLOAD = "log-uniform(num_requests=30,prompt_tokens=(8,60),output_tokens=(2,10))"
SIZES = ["--workload", WORKLOAD, "--rate", "20"]
BROKEN = {
    "Broken": "answers were given by default",
    "WrongOnce": "1 answer was given by default (",
    "RaisesAtTheEnd": "1 answer was given by default (",
    "Idles": "planned by default",
    "Corrupts": "Corrupts failed with AttributeError",
}


def cells(*policies: str, **fields: Any) -> list[Any]:
    told = {"workload": find_workload(WORKLOAD), "rate": 20.0, "seeds": [0, 1], **fields}
    return compare(Experiment(policies=policies, **told))


@pytest.mark.parametrize(("name", "why"), BROKEN.items())
def test_it_has_no_column_and_the_others_stay(name: str, why: str) -> None:
    [sound] = cells("fcfs", "vtc")
    [cell] = cells("fcfs", WHERE + name, "vtc")
    assert cell.names == ["fcfs", "vtc"] and list(cell.left_out) == [WHERE + name]
    assert why in cell.left_out[WHERE + name]
    found = [[each.value("ttft.mean") for each in column] for column in cell.figures]
    assert found == [[each.value("ttft.mean") for each in column] for column in sound.figures]
    assert cell.difference(1, "ttft.mean").ours == sound.difference(1, "ttft.mean").ours


@pytest.mark.parametrize("name", ["Broken", "WrongOnce", "RaisesAtTheEnd", "Idles"])
def test_its_run_has_no_figures(name: str, tmp_path: Path) -> None:
    """Also if it is read from a file, which names it."""
    done = run(WHERE + name, WORKLOAD, rate=20.0)
    path = tmp_path / "run.jsonl"
    done.write(path)
    assert WHERE + name in path.read_text() and "by default" in path.read_text()
    for each in (done, Run.read(path)):
        with pytest.raises(PolicyError, match=f"policy .*{name} has no figures: .* by default"):
            figures(each)


def test_a_run_that_cannot_go_on_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Which hook may have done it is named, and how to find out."""
    assert main(["simulate", "--policy", f"{WHERE}Corrupts", *SIZES]) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert f"{WHERE}Corrupts failed with AttributeError" in err
    assert "(rank, on_grant)" in err and "metronome verify --policy" in err


@pytest.mark.parametrize("command", [["simulate", "--policy"], ["compare", "fcfs"]])
def test_a_misspelt_hook_gets_no_figures(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"{WHERE}Misspelt", *SIZES]) == 1
    out, err = capsys.readouterr()
    assert not out and "Misspelt.rnak is never called" in err and "did you mean 'rank'" in err


def test_a_sound_run_says_nothing_of_it(tmp_path: Path) -> None:
    done = run("vtc", WORKLOAD, rate=20.0)
    done.write(tmp_path / "run.jsonl")
    assert not done.not_own and "not_own" not in (tmp_path / "run.jsonl").read_text()


def test_who_fails_at_one_setting_is_left_out_of_all() -> None:
    """With few requests none is the one that gets a wrong answer."""
    found = cells("fcfs", f"{WHERE}RaisesAtTheEnd", sweep=("num_requests", [10, 30]))
    assert [cell.names for cell in found] == [["fcfs"], ["fcfs"]]
    assert all(f"{WHERE}RaisesAtTheEnd" in cell.left_out for cell in found)
    ten = find_workload(WORKLOAD.replace("30", "10", 1))
    [few] = cells("fcfs", f"{WHERE}RaisesAtTheEnd", workload=ten)
    assert few.names == ["fcfs", f"{WHERE}RaisesAtTheEnd"] and not few.left_out


COMMANDS = {
    "compare": ["compare", "fcfs", f"{WHERE}WrongOnce", "--seeds", "2", *SIZES],
    "first": ["compare", f"{WHERE}WrongOnce", "fcfs", "vtc", "--seeds", "2", *SIZES],
    "policies": ["policies", "--policies", f"fcfs,{WHERE}WrongOnce", *SIZES],
    "sweep": [
        *("compare", "fcfs", f"{WHERE}WrongOnce", "--seeds", "2", *SIZES),
        *("--sweep", "max_num_seqs=2,8"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_it_everywhere(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name, page = f"{WHERE}WrongOnce", tmp_path / "page.html"
    asked = [*COMMANDS[command], "--report", str(page)]
    assert main(asked) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith(f"{name} is left out, since it has no figures: 1 a") for line in lines
    )
    assert not any(line.startswith(f"{name}  ") for line in lines)
    if command == "first":
        assert "differences are from fcfs, the first policy that has figures" in lines
    assert main([*COMMANDS[command], "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert name not in {row["policy"] for row in rows}
    assert all(row["left_out"].startswith(f"{name}: 1 answer was") for row in rows)
    assert main([*COMMANDS[command], "--csv"]) == 1
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["policy"] for row in table] == [row["policy"] for row in rows]
    assert all(row["left_out"].startswith(f"{name}: 1 answer was") for row in table)
    assert f"{name} is left out, since it has no figures" in page.read_text()
    data = read_report(page)
    assert list(data["left_out"]) == [name]
    assert name not in {run["label"] for run in data["runs"]}
    assert name not in {point["policy"].partition(",")[0] for point in data["points"]}


def test_if_nobody_is_left_that_is_all_there_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    asked = ["compare", f"{WHERE}Idles", "--seeds", "2", *SIZES]
    assert main([*asked, "--report", str(page)]) == 1
    assert f"{WHERE}Idles is left out" in capsys.readouterr().out
    assert f"{WHERE}Idles is left out" in page.read_text()
    assert main([*asked, "--json"]) == 1
    [row] = json.loads(capsys.readouterr().out)
    assert row["policy"] == "" and row["left_out"].startswith(f"{WHERE}Idles: ")
    assert main([*asked, "--csv"]) == 1
    assert f"{WHERE}Idles: " in capsys.readouterr().out
    assert main(["policies", "--policies", f"{WHERE}Idles", *SIZES]) == 1
    assert f"{WHERE}Idles is left out" in capsys.readouterr().out


def test_simulate_writes_the_file_and_no_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    asked = ["simulate", "--policy", f"{WHERE}Broken", *SIZES, "--out", str(out)]
    assert main([*asked, "--report", str(page)]) == 1
    shown = capsys.readouterr().out
    assert f"{WHERE}Broken is left out, since it has no figures: 4 answers" in shown
    assert "and the policy was then switched off" in shown and "mean" not in shown
    assert f"{WHERE}Broken is left out" in page.read_text() and not read_report(page)["runs"]
    for again in (asked, ["simulate", "--read", str(out)]):
        assert main([*again, "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert told["left_out"].startswith(f"{WHERE}Broken: ") and "figures" not in told
