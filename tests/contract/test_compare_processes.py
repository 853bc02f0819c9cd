"""Experiments in several processes: the same table, and a clear word when one dies."""

from __future__ import annotations

import pytest

from engine.cli.main import main
from engine.errors import ConfigError
from policylab.sim.experiment import in_processes

COPY = "support.lab_policies.Copy"


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["compare", *args, "--requests", "60"]) == 0
    return capsys.readouterr().out


def refuse(item: int) -> int:
    raise ConfigError(f"load is {item}")


def test_two_processes_give_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("fcfs", COPY, "residual-sjf", "--seeds", "2", "--loads", "0.6,0.9")
    alone = told(capsys, *asked)
    assert told(capsys, *asked, "--jobs", "2") == alone


def test_a_process_that_dies_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("support.lab_policies.Dies", "--requests", "5", "--seeds", "2", "--jobs", "2")
    assert main(["compare", *asked]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    assert said.err.startswith("metronome: error: a simulating process died")
    assert "with fewer --jobs" in said.err


def test_what_a_process_raises_is_raised_here() -> None:
    with pytest.raises(ConfigError, match="load is 1"):
        list(in_processes(refuse, [1, 2], 2))
