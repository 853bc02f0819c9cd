"""Benchmarks run, and what they measure stays the same, so that days can be compared."""

from dataclasses import replace

import pytest
import workloads
from pairs import Pair, estimate_for, interval
from peers.metronome_scheduler import Ours
from peers.scheduler_driver import MEASURES
from scheduler_loads import LOADS


def test_workloads_and_loads_are_those_of_other_days() -> None:
    assert workloads.make("W1", 1) == workloads.make("W1", 1) != workloads.make("W1", 2)
    assert workloads.make("W2")[0].prompt[:4] == [7841, 7080, 7774, 6965]
    assert workloads.make("W4")[-1].num_output == 86
    assert LOADS["chunked"].prompt(3)[:3] == [7767, 7798, 7829]


@pytest.mark.parametrize("name", ["decode_256_hooks", "preempting", "hash_fast", "queue_static"])
def test_our_scheduler_runs_the_loads(name: str) -> None:
    """What a step must have done is checked while it is measured."""
    load = LOADS[name]
    count = {"decode": load.requests, "drain": 12, "lookup": 2, "queue": 300}[load.kind]
    few = replace(load, requests=count, steps=min(load.steps, 3))
    assert MEASURES[load.kind](Ours, few)


def test_two_checkouts_are_compared_by_turns_and_with_an_interval() -> None:
    rounds = [Pair([3.0, 1.0], [1.0, 1.0]), Pair([1.0, 2.0], [3.0]), Pair([9.0], [3.0])]
    assert estimate_for("workloads", "W1")(rounds) == pytest.approx(2.0)
    disturbed = [Pair([2.0, 2.0, 2.0], [1.0, 1.0, 50.0]) for _ in range(3)]
    assert estimate_for("trips", "process")(disturbed) == pytest.approx(2.0)
    estimate = estimate_for("workloads", "W1")
    mixed = [Pair([1.0 + number / 10], [1.0]) for number in range(12)]
    least, most = interval(mixed, estimate)
    assert 1.0 < least < estimate(mixed) < most < 2.1
