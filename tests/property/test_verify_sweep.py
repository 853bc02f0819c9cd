"""The k-th call that may fail does fail, for every k: hooks, the worker, memory for blocks."""

import logging

import pytest

from policylab.verify.case import Bring, Case, Jump
from policylab.verify.draw import draw_case
from policylab.verify.simulation import Simulation
from tools.sweep import sweep

# Short cases with different policies and resources; seeds are looked for, not fixed, so that the
# scenarios stay what they are named after when the way they are drawn changes.
SCENARIOS = (
    *(("fcfs", None), ("priority", "grammars"), ("trail", "adapters"), ("mc-sf", "tiers")),
    *(("qoserve", "drafts"), ("lpm", "moods"), ("past-future", "encoder")),
    *(("fcfs", "states"), ("fcfs", "pictures")),
)
FURTHER = (
    *(("vtc", None), ("slai", "tiers"), ("andes", None), ("fastserve", None), ("dlpm", "grammars")),
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


@pytest.mark.parametrize(
    ("policy", "need"),
    [*SCENARIOS, *(pytest.param(*each, marks=pytest.mark.slow) for each in FURTHER)],
)
def test_whatever_fails_nothing_is_lost(policy: str, need: str | None) -> None:
    cases = (draw_case(seed, policy) for seed in range(1000))
    found = (case for case in cases if is_short(case) and has_need(case, need))
    case = next(case for case in found if simulated(case).planned.num_full)
    ended: dict[str, list[bool]] = {"worker": [], "memory": [], "hook": []}
    for swept in sweep(case):
        ended[swept.part].append(swept.ended)
    assert ended["worker"] and ended["memory"], "neither worker nor memory ever failed"
    assert all(ended["worker"] + ended["memory"]) and not any(ended["hook"])


def is_short(case: Case) -> bool:
    """Some events; no clock jumps, which times everybody out before anything is computed."""
    events = [event for event in case.events if not isinstance(event, Bring)]
    return 3 <= len(events) <= 6 and not any(isinstance(event, Jump) for event in events)


def has_need(case: Case, need: str | None) -> bool:
    if need == "states":
        return loads_states(case)
    is_other = "pictures" in case.setup.needs and need != "pictures"
    return not is_other and (need is None or need in case.setup.needs)


def loads_states(case: Case) -> bool:
    """True if a request of the case starts from a snapshot of the model's states."""
    if not case.setup.snapshot_blocks:
        return False
    return simulated(case).scheduler.make_stats().counters.get("snapshots.loaded", 0) > 0


def simulated(case: Case) -> Simulation:
    simulation = Simulation(case, leaks=False, plugins=False)
    simulation.run()
    return simulation
