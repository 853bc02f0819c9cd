"""Random engines with KV tiers, and small cases of what was wrong once."""

import logging
from random import Random
from typing import Any

import pytest

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from policylab.verify.case import Abort, Add, Case, Event, Setup
from policylab.verify.draw import draw_case
from policylab.verify.draw_tiers import edit
from policylab.verify.simulation import Simulation
from policylab.verify.tiers import DEAD, PLAIN, SLOW, STORES, SimulatedTiers

LIMIT = 4  # ticks that a request waits for a load


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))]
)
def test_tiers_serve_no_wrong_block_and_keep_none(first: int) -> None:
    num_loaded = 0
    for seed in range(first * 250, (first + 1) * 250):
        case = draw_case(seed)
        if SimulatedTiers.name in case.setup.needs:
            try:
                num_loaded += Simulation(case, every=8, leaks=seed % 8 == 0).run().num_loaded
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error
    assert num_loaded > 20


PREEMPTING: list[tuple[str, dict[str, Any]]] = [
    ("priority", {"preempt_for_waiting": True}),
    ("ltr", {"starve_steps": 5, "boost_tokens": 3}),
    *((name, {}) for name in ("fastserve", "trail", "andes", "fcfs")),
]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))]
)
def test_preempted_requests_resume_in_the_middle_of_a_block(first: int) -> None:
    """Also with windows, steps in flight that fail, and stores with faults."""
    num_resumed = 0
    for seed in range(first * 20, (first + 1) * 20):
        rng = Random(seed)
        events: list[Event] = []
        for n in range(rng.randint(6, 24)):
            at = 0 if not events else events[-1].at + rng.choice((0, 0, 1, 3, 10))
            fails_at = rng.randint(0, 12) if rng.random() < 0.1 else None
            prompt = [rng.randrange(61) for _ in range(rng.randint(1, 16))]
            event = add(at, f"r{n}", prompt, num_new=rng.randint(1, 20), fails_at=fails_at)
            events.append(edit(event, request=edit(event.request, priority=rng.randrange(4))))
        size, windows = rng.choice((2, 3, 4, 8)), rng.choice(((0,), (0,), (0, 5), (6,)))
        policy, policy_options = rng.choice(PREEMPTING)
        config = SchedulerConfig(
            max_num_batched_tokens=rng.choice((4, 12, 40)),
            max_num_seqs=rng.randint(1, 4),
            max_model_len=40,
            num_steps_in_flight=rng.choice((1, 2, 3)),
            scheduling_policy=policy,
            policy_options=policy_options,
            length_predictor="history",
        )
        setup = Setup(
            config=config,
            num_blocks=1 + len(windows) * (-(-40 // size) + rng.randint(0, 6)),
            block_size=size,
            windows=windows,
            needs={SimulatedTiers.name: rng.choice((2, 6, 40))},
            seed=seed,
            stores=(PLAIN, rng.choice(STORES)),
        )
        simulation = Simulation(Case(setup=setup, events=events), every=8, leaks=False)
        try:
            simulation.run()  # checks all that is read, cached and stored
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_resumed += simulation.scheduler.kv.counts.preempted_hits % size > 0
    assert num_resumed > 0


def test_what_a_failed_step_has_computed_is_not_stored() -> None:
    """The next step is planned before it is known that this one has failed."""
    events = [add(0, "a", [1, 2, 3, 4], fails_at=1), add(9, "b", [1, 2, 3, 4])]
    for depth in (1, 2, 3):
        simulation = simulate(events, depth=depth)
        simulation.run()  # checks what was stored
        assert tiers_of(simulation).copies.stored


def test_a_load_from_a_dead_store_gives_its_blocks_back() -> None:
    """Two requests wait, of which one ends meanwhile."""
    events: list[Event] = [
        add(0, "a", [1, 2, 3, 4, 5, 6]),
        add(9, "b", [9] * 6),  # takes the place of the others
        add(18, "c", [1, 2, 3, 4, 5, 7]),
        add(30, "e", [8] * 6),
        add(40, "d", [1, 2, 3, 4, 5, 8]),
        Abort(42, ["d"]),
    ]
    simulation = simulate(events, stores=(DEAD,), num_blocks=8)
    outcome = simulation.run()  # checks that all blocks are free
    counted = tiers_of(simulation).counters()
    assert outcome.num_loaded == 0 and counted["loads"] == 2


def test_blocks_that_loads_hold_count_in_their_group_until_then() -> None:
    """A request ends whose prompt another one's load needs in part."""
    events = [
        add(0, "a", [1, 2, 3, 4, 5, 6]),
        add(9, "b", [9, 8, 7, 6]),
        add(18, "c", [1, 2, 3, 4, 5, 6], num_new=3),
        add(18, "d", [1, 2, 3, 4, 5, 6]),
    ]
    outcome = simulate(events, windows=(0, 3), num_blocks=18).run()
    assert outcome.num_loaded > 0


def test_a_request_that_others_overtake_is_not_loaded_again_and_again() -> None:
    """While it waits for a load, small requests take its place, and the blocks of its prompt."""
    big, rng = list(range(14)), Random(25)
    events = [add(0, "first", big)]
    events += [add(10 + n, f"between {n}", [60 - n] * 7) for n in range(6)]
    for n in range(100):
        prompt = [rng.randrange(61) for _ in range(rng.randint(3, 7))]
        events.append(add(40 + n * 2, f"small {n}", prompt, num_new=rng.randint(2, 9)))
    events.append(add(60, "big", [*big, 5]))
    events.sort(key=lambda event: event.at)
    simulation = simulate(events, stores=(SLOW,), num_blocks=24, patience=30, longest=32)
    simulation.run()
    assert 0 < tiers_of(simulation).loaded_for["big"] <= 2


def test_a_request_may_keep_its_blocks_out_of_stores() -> None:
    for wishes, num_stored in (({"store": False}, 0), (None, 5), ({"store": True}, 5)):
        simulation = simulate([add(0, "a", [1, 2, 3, 4, 5], wishes=wishes)])
        simulation.run()
        assert len(tiers_of(simulation).copies.stored) == num_stored


def add(
    at: int,
    name: str,
    prompt: list[int],
    *,
    num_new: int = 1,
    fails_at: int | None = None,
    wishes: dict[str, Any] | None = None,
) -> Add:
    request = AddRequest(
        name,
        prompt,
        SamplingParams(max_tokens=num_new),
        seed=0,
        arrival_time=at / 64,
        max_tokens=num_new,
        kv_transfer_params=wishes,
    )
    return Add(at, request, fails_at)


def simulate(
    events: list[Event],
    *,
    depth: int = 1,
    stores: tuple[str, ...] = (PLAIN,),
    num_blocks: int = 20,
    windows: tuple[int, ...] = (0,),
    patience: int = LIMIT,
    longest: int = 16,
) -> Simulation:
    config = SchedulerConfig(
        max_num_batched_tokens=longest,
        max_num_seqs=longest // 8,
        max_model_len=longest,
        num_steps_in_flight=depth,
    )
    setup = Setup(
        config=config,
        num_blocks=num_blocks,
        block_size=1,
        windows=windows,
        needs={SimulatedTiers.name: patience},
        seed=1,
        stores=stores,
    )
    return Simulation(Case(setup=setup, events=events))


def tiers_of(simulation: Simulation) -> SimulatedTiers:
    assert simulation.tiers is not None
    return simulation.tiers
