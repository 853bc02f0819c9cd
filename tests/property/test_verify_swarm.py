"""The simulation tier: every shipped policy in random engines, with every check after every step.

Twenty thousand steps, others each day: the first seeds are printed, and METRONOME_SEED
chooses them. The campaign's are `metronome verify --steps 20000000`.
"""

import logging
import os
import subprocess
import sys
from datetime import UTC, datetime
from itertools import count

import msgspec
import pytest

from engine.sched.policies import POLICIES
from policylab.verify.draw import draw_case
from policylab.verify.simulation import CaseOutcome, Simulation
from policylab.verify.starvation import wait_in_overload
from policylab.verify.swarm import Report, Swarm, replay_corpus, reproduction, smallest

NUM_STEPS = 10_000
STEPS_EACH = NUM_STEPS // len(POLICIES) + 1
SEEDS_A_DAY = 1000  # far more than a day takes of them
DAYS = 1000  # until the same seeds come again
AGELESS = ("priority",)  # a low priority may wait for ever: that is what it asks for


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals are part of the workload; each would be a line."""
    caplog.set_level(logging.CRITICAL, "engine")


def assert_holds(tally: Report) -> None:
    for found in tally.found:
        pytest.fail(
            f"seed {found.seed}: {found.broken.message} ({found.broken.place})\n"
            f"{reproduction(smallest(found))}"
        )


def first_seed(policy: str) -> int:
    """The first seed of today's cases of a policy."""
    chosen = os.environ.get("METRONOME_SEED")
    day = datetime.now(UTC).toordinal() % DAYS
    offset = int(chosen) if chosen else SEEDS_A_DAY * day
    print(f"seeds from {offset} on for each policy (METRONOME_SEED={offset} repeats this run)")
    return SEEDS_A_DAY * DAYS * sorted(POLICIES).index(policy) + offset


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_keeps_every_promise(policy: str) -> None:
    first = first_seed(policy)
    tally = Swarm(policy).run(count(first), STEPS_EACH)
    assert_holds(tally)
    assert tally.num_steps >= STEPS_EACH


def test_what_broke_once_holds() -> None:
    assert_holds(replay_corpus(Swarm()))


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(AGELESS)))
def test_nobody_starves(policy: str) -> None:
    assert wait_in_overload(policy, {}, limit=1000).num_steps is not None


def test_a_case_without_a_step_is_run_twice_as_others_are() -> None:
    case = msgspec.structs.replace(draw_case(0, "fcfs", None), events=[])
    outcome = Swarm(every=8).judge(case, twice=True)
    assert isinstance(outcome, CaseOutcome) and outcome.num_steps == 0


def test_another_process_makes_the_same_plans() -> None:
    """No decision hangs on the order of a set or on an address."""
    code = (
        "from policylab.verify.draw import draw_case\n"
        "from policylab.verify.simulation import Simulation\n"
        "print([Simulation(draw_case(seed)).run().digest for seed in range(30)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    here = [Simulation(draw_case(seed)).run().digest for seed in range(30)]
    assert done.stdout == f"{here}\n", done.stderr
