"""A start on a CPU meets the largest step where that is a quick one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.worker.warmup import LARGEST_SECONDS, run_largest_step


class Machine:
    """A driver whose steps are reckoned to take so many seconds, or that does not know."""

    def __init__(self, seconds: float | None, *, fails: bool = False) -> None:
        self.runs: list[tuple[int, int]] = []
        self._fails = fails
        self.runner = self
        self.roofline: Any = None
        if seconds is not None:
            self.roofline = SimpleNamespace(floor=lambda steps: seconds)

    def profile_run(self, num_tokens: int, num_seqs: int) -> None:
        self.runs.append((num_tokens, num_seqs))
        if self._fails:
            raise RuntimeError("a model of the tests")


@pytest.mark.parametrize(
    ("sizes", "run"),
    [
        ((1024, 256, 2048), (1024, 1)),
        ((2048, 256, 512), (2048, 4)),
        ((1024, 8, 64), (512, 8)),  # no more requests than seats, none longer than it may be
        ((1000, 4, 300), (1000, 4)),
    ],
)
def test_it_has_as_many_tokens_as_requests_can_bring(
    sizes: tuple[int, int, int], run: tuple[int, int]
) -> None:
    machine = Machine(0.1)
    run_largest_step(machine, *sizes)  # type: ignore[arg-type]
    assert machine.runs == [run]


@pytest.mark.parametrize("seconds", [None, LARGEST_SECONDS])
def test_what_takes_long_or_is_not_known_is_left_to_requests(seconds: float | None) -> None:
    machine = Machine(seconds)
    run_largest_step(machine, 1024, 256, 2048)  # type: ignore[arg-type]
    assert not machine.runs


def test_a_model_that_fails_tells_its_requests() -> None:
    machine = Machine(0.1, fails=True)
    run_largest_step(machine, 1024, 256, 2048)  # type: ignore[arg-type]
    assert machine.runs
