"""Drafts by every method and grammars, as they serve, in random engines with every check on.

Whatever is drafted, each request must hear the tokens that follow from it alone, and a text must
follow its grammar.
"""

import logging
from collections.abc import Iterator
from functools import cache
from itertools import count

import pytest

from engine.config.sched import SchedulerConfig
from engine.config.speculative import METHODS
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched.interface import PauseState
from policylab.simulated import SimulatedHalves
from policylab.verify.case import Add, Case, Pause, Reset, Setup, from_json, to_json
from policylab.verify.draw import draw_case
from policylab.verify.simulation import CaseOutcome
from policylab.verify.swarm import Report, Swarm, reproduction, smallest

NUM_CASES = 12
LONG = 600


@cache
def halves() -> SimulatedHalves:
    return SimulatedHalves()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


def cases_of(method: str | None, first: int) -> Iterator[tuple[int, Case]]:
    """Cases that draft by this method, by their seeds."""
    for seed in count(1000 * first + 1, 2):
        case = draw_case(seed, has_halves=True)
        asked = case.setup.config.speculative_config
        if (None if asked is None else asked["method"]) == method:
            yield seed, case


def run(method: str | None, first: int, num_cases: int) -> Report:
    swarm, report = Swarm(halves=halves()), Report()
    for seed, case in cases_of(method, first):
        swarm.enter(report, seed, case)
        for found in report.found:
            small = reproduction(smallest(found, halves=halves()))
            pytest.fail(f"seed {seed}: {found.broken.message} ({found.broken.place})\n{small}")
        if report.num_runs == num_cases:
            return report
    raise AssertionError("there are cases without end")


@pytest.mark.parametrize("method", [*METHODS, None])
def test_drafts_and_grammars_change_no_token_that_is_right(method: str | None, seed: int) -> None:
    report = run(method, seed, NUM_CASES)
    assert report.num_followed >= NUM_CASES // 3
    assert report.num_drafts_right >= NUM_CASES // 3 if method else not report.num_drafts_right


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, None])
def test_in_many_engines_too(method: str | None, seed: int) -> None:
    assert run(method, seed + 100_000, LONG).num_runs == LONG


def test_a_case_without_what_it_asks_for_is_no_case_that_passes() -> None:
    _, case = next(cases_of("ngram", 0))
    report = Report()
    Swarm().enter(report, 1, case)
    assert "this case has drafts or grammars" in report.found[0].broken.message


def test_a_case_with_drafts_and_grammars_travels_as_text() -> None:
    cases = [draw_case(seed, has_halves=True) for seed in range(1, 40, 2)]
    assert [from_json(to_json(case)) for case in cases] == cases
    program = reproduction(next(case for case in cases if case.setup.has_halves))
    assert "from policylab.simulated import SimulatedHalves" in program
    assert "halves=SimulatedHalves()).run()" in program


def test_a_request_that_ended_before_its_last_step_settles_is_forgotten() -> None:
    """A second step is in flight when the first ends the request; no later step comes."""
    config = SchedulerConfig(
        max_model_len=3,
        max_num_seqs=1,
        max_num_batched_tokens=3,
        num_steps_in_flight=2,
        speculative_config={
            "method": "draft_model",
            "num_speculative_tokens": 2,
            "adaptive": True,
            "model": "of the worker",
        },
    )
    setup = Setup(
        config=config,
        num_blocks=2,
        block_size=2,
        caching=False,
        seed=845164107,
        is_steady=False,
        grammar_ticks=0,
    )
    request = AddRequest(
        request_id="39",
        prompt_token_ids=[0],
        params=SamplingParams(max_tokens=2),
        seed=0,
        max_tokens=2,
        arrival_time=0.0,
        eos_token_ids=[60],
        grammar='{"kind":"choice","text":"[\\"!\\"]"}',
    )
    events = [
        Pause(at=188, state=PauseState.PAUSED_NEW),
        Add(at=195, request=request),
        Pause(at=232, state=PauseState.UNPAUSED),
        Reset(at=234),
    ]
    outcome = Swarm(halves=halves()).judge(Case(setup=setup, events=events))
    assert isinstance(outcome, CaseOutcome), outcome
