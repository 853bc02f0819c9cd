"""Steps that are jumped over: every plan, block, time and count as if each had been planned alone.

Some forty cases, others each day: the first seed is printed, and METRONOME_SEED chooses it.
"""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pytest
from support.stretched import compare, draw_case

from engine.sched.policies import POLICIES
from policylab.sim.jumps.scheduling import Stretches
from policylab.sim.jumps.stretch import Stretch
from policylab.sim.worker import Launched, TimedWorker

NUM_EACH = 1
NUM_CAMPAIGN = 1000
SEEDS_A_DAY = 2000
# Their ranks, limits or hooks change with every step, so there is nothing to jump over.
NEVER_JUMP = (
    *("andes", "conserve", "fastserve", "ltr", "prefill-first", "qoserve", "slai", "trail"),
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals are part of the workload; each would be a line."""
    caplog.set_level(logging.CRITICAL, "engine")


def first_seed() -> int:
    """The first seed of today's cases."""
    chosen = os.environ.get("METRONOME_SEED")
    offset = int(chosen) if chosen else SEEDS_A_DAY * datetime.now(UTC).toordinal()
    print(f"seeds from {offset} on (METRONOME_SEED={offset} repeats this run)")
    return offset


def check(policy: str | None, first: int, count: int) -> tuple[int, int]:
    """Steps that were jumped over, and all."""
    num_jumped = num_steps = 0
    for seed in range(first, first + count):
        try:
            trace = compare(draw_case(seed, policy))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, policy {policy}: {error}") from error
        num_jumped += trace.num_jumped
        num_steps += len(trace.plans)
    return num_jumped, num_steps


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_stretched_is_stepped(policy: str) -> None:
    never = policy in NEVER_JUMP
    num_jumped, _ = check(policy, first_seed(), 1 if never else NUM_EACH)
    assert not (never and num_jumped)


@pytest.mark.slow
def test_a_thousand_stretched_are_stepped() -> None:
    num_jumped, num_steps = check(None, first_seed(), NUM_CAMPAIGN)
    assert num_jumped > num_steps / 5, f"{num_jumped} of {num_steps} steps"


def too_many(stretches: Stretches, until: float, in_flight: Sequence[int]) -> Stretch | None:
    """A step more than there are blocks or tokens for."""
    stretch = FIND(stretches, until, in_flight)
    if stretch is not None:
        stretch.max_steps += 1
    return stretch


def too_late(stretches: Stretches, until: float, in_flight: Sequence[int]) -> Stretch | None:
    """A step more than comes before an arrival or a timer."""
    stretch = FIND(stretches, until, in_flight)
    if stretch is not None:
        stretch.until += 5e-3
    return stretch


FIND = Stretches.find


@pytest.mark.parametrize("wrong", (too_many, too_late))
def test_a_stretch_one_step_too_long_is_found(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Stretch | None]
) -> None:
    monkeypatch.setattr(Stretches, "find", wrong)
    with pytest.raises((AssertionError, ValueError)):
        check("fcfs", 0, 30)


def test_an_end_that_the_worker_overlooks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TimedWorker.repeat

    def late(worker: TimedWorker, stretch: Stretch, tickets: Sequence[Launched]) -> list[Launched]:
        stretch.starts = stretch.starts - 1  # so that each row seems to have a step more
        try:
            return right(worker, stretch, tickets)
        finally:
            stretch.starts = stretch.starts + 1

    monkeypatch.setattr(TimedWorker, "repeat", late)
    with pytest.raises(AssertionError):
        check("fcfs", 0, 30)
