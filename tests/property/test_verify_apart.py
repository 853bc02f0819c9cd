"""Random prefill and decode cores, and small cases of what goes wrong between them."""

from __future__ import annotations

import logging
from itertools import count, islice

import pytest

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from policylab.verify.apart import ApartSimulation, is_apart
from policylab.verify.case import Abort, Add, Case, Event, Kill, Setup
from policylab.verify.draw import draw_case
from policylab.verify.swarm import Broken, Swarm, reproduction
from policylab.verify.tiers import DEAD, PLAIN

PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


@pytest.mark.parametrize(
    "first", [7000, *(pytest.param(20_000 * n, marks=pytest.mark.slow) for n in range(1, 9))]
)
def test_each_request_ends_once_with_its_tokens(first: int) -> None:
    swarm = Swarm(every=8)
    drawn = ((seed, draw_case(seed)) for seed in count(first))
    for seed, case in islice((each for each in drawn if is_apart(each[1].setup)), 12):
        done = swarm.judge(case, twice=seed % 4 == 0, leaks=seed % 8 == 0)
        assert not isinstance(done, Broken), f"seed {seed}: {done.message}\n{reproduction(case)}"


def test_one_core_computes_a_prompt_and_another_one_continues_it() -> None:
    """Each decode core loads two blocks; the third one is computed, since its last token is."""
    num_loaded, counts = run([add(0, "a"), add(1, "b"), add(30, "c", [7, 7])], threshold=4)
    assert counts["sent"] == counts["done"] == 1 and num_loaded == 4


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("event", ["abort", "prefill core dies", "decode core dies"])
def test_a_request_ends_whatever_happens_when(event: str, at: int) -> None:
    other = {
        "abort": Abort(at, ["a"]),
        "prefill core dies": Kill(at, 0, at % 3),
        "decode core dies": Kill(at, 1, at % 3),
    }[event]
    run([add(0, "a"), other, add(at, "b"), add(at + 4, "c")])


def test_blocks_that_never_come_are_computed() -> None:
    num_loaded, counts = run([add(0, "a"), add(3, "b")], stores=(DEAD,))
    assert num_loaded == 0 and counts["sent"] and counts["done"] == counts["sent"]


def run(
    events: list[Event], *, threshold: int = 1, stores: tuple[str, ...] = (PLAIN,)
) -> tuple[int, dict[str, int]]:
    """Run a case on a prefill core and two decode cores. Returns how many blocks were loaded, and
    what prefills there were."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=16)
    setup = Setup(
        config=config,
        num_blocks=40,
        block_size=2,
        needs={"tiers": 6},
        stores=stores,
        seed=3,
        prefill_cores=1,
        decode_cores=2,
        prefill_threshold=threshold,
    )
    simulation = ApartSimulation(Case(setup=setup, events=events))
    return simulation.run().num_loaded, simulation.counts


def add(at: int, name: str, prompt: list[int] = PROMPT) -> Add:
    params = SamplingParams(max_tokens=4)
    return Add(at, AddRequest(name, prompt, params, seed=0, arrival_time=at / 64, max_tokens=4))
