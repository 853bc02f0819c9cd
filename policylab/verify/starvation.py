"""Check that a request is served although better-ranked requests keep arriving."""

from __future__ import annotations

from enum import Enum
from itertools import count
from typing import Any, NamedTuple

from engine.config.sched import SchedulerConfig
from engine.messages.requests import AddRequest
from policylab.verify.case import Add, Case, Setup, plain_request
from policylab.verify.simulation import Simulation

VICTIM = "victim"
BACKLOG = 6  # waiting requests at any time: more than can run
TICK = 0.25  # seconds per step: a minute is 240 steps


class Outcome(Enum):
    """What happened to a request while better-ranked requests kept arriving."""

    SERVED = "served"
    STARVED = "not served"
    DEFERRED = "kept out of the queue"
    REFUSED = "refused, which shows nothing about starvation"
    ALONE = "served, but all later requests were refused, which shows nothing about starvation"


class Waited(NamedTuple):
    """The result of an overload test for the request that had to wait."""

    outcome: Outcome
    num_steps: int | None  # until its last token; ``None``: it was not served within the limit
    num_refusals: int = 0  # how often it was refused on arrival


def wait_in_overload(policy: Any, options: dict[str, Any], limit: int) -> Waited:
    """Test whether an unfavoured request gets its last token within ``limit`` steps of an overload.

    It arrives last in a full queue, is long, shares no prefix, belongs to the most-served user, and
    has the lowest priority and a late deadline; all later requests are short and urgent. If it is
    refused it arrives again before the next step."""
    simulation = Simulation(Case(setup=_setup(policy, options), events=[]), every=16)
    live, names = simulation.clients.live, map(str, count())
    for _ in range(BACKLOG):
        simulation.happen(Add(at=0, request=_long(next(names), 1, 0.0)))
    is_taken, num_refusals, num_rivals = False, 0, 0
    while simulation.num_steps < limit and (VICTIM in live or not is_taken):
        if not is_taken:
            simulation.happen(Add(at=0, request=_long(VICTIM, 2, simulation.now)))
            is_taken = VICTIM in live
            num_refusals += not is_taken
        counts = simulation.scheduler.get_request_counts()
        num_before = simulation.clients.num_accepted
        for _ in range(BACKLOG - counts.waiting - counts.parked):
            simulation.happen(Add(at=0, request=_short(next(names), simulation.now)))
        num_rivals += simulation.clients.num_accepted - num_before
        simulation.step()
    num_steps = simulation.num_steps
    outcome = Outcome.REFUSED
    if is_taken and VICTIM in live:
        is_parked = VICTIM in simulation.scheduler.roster.parked
        outcome = Outcome.DEFERRED if is_parked else Outcome.STARVED
    elif is_taken:
        outcome = Outcome.SERVED if num_rivals else Outcome.ALONE
    simulation.drain()
    is_served = outcome in (Outcome.SERVED, Outcome.ALONE)
    return Waited(outcome, num_steps if is_served else None, num_refusals)


def _setup(policy: Any, options: dict[str, Any]) -> Setup:
    """A small simulated engine with four seats."""
    config = SchedulerConfig(
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_model_len=64,
        scheduling_policy=policy,
        policy_options=options,
        length_predictor="oracle",
    )
    return Setup(config=config, num_blocks=33, block_size=4, tick=TICK)


def _long(name: str, priority: int, now: float) -> AddRequest:
    prompt = [40 + index for index in range(20)] if name == VICTIM else [30] * 20
    hints = {"output_tokens": 20, "program": "greedy"}
    deadline = now + 100.0
    return plain_request(
        name, prompt, 20, now, "greedy", priority=priority, deadline=deadline, hints=hints
    )


def _short(name: str, now: float) -> AddRequest:
    user = f"user {int(name) % 4}"
    hints = {"output_tokens": 4, "program": user}
    return plain_request(name, [1, 2, 3, 4, 5, 6], 4, now, user, deadline=now + 1.0, hints=hints)
