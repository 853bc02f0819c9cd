"""Simulations in several processes: the same figures as in one, and a process that dies is said."""

from __future__ import annotations

import os

import pytest

from engine.errors import EngineDeadError
from engine.sim.compare import Experiment, compare
from engine.sim.experiment import in_processes
from engine.sim.workloads import find_workload


def test_processes_find_what_one_finds() -> None:
    workload = find_workload("log-uniform(num_requests=60, prompt_tokens=(8, 100))")
    what = Experiment(policies=["fcfs", "vtc"], workload=workload, loads=[0.5, 0.9], seeds=[0, 1])
    alone, shared = compare(what), compare(what, jobs=2)
    assert [cell.rate for cell in alone] == [cell.rate for cell in shared]
    for one, other in zip(alone, shared, strict=True):
        for ours, theirs in zip(one.figures, other.figures, strict=True):
            for found, again in zip(ours, theirs, strict=True):
                assert found.values() == pytest.approx(again.values(), nan_ok=True, rel=0, abs=0)


def die(number: int) -> int:
    os._exit(number)


def test_a_process_that_dies_is_said() -> None:
    with pytest.raises(EngineDeadError, match="a process that simulated has died"):
        list(in_processes(die, [1, 2], 2))
