"""Is a request served though others, better ones by any measure, never cease to come?"""

from __future__ import annotations

from enum import Enum
from itertools import count
from typing import Any, NamedTuple

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from policylab.verify.case import Add, Case, Setup
from policylab.verify.simulation import Simulation

VICTIM = "victim"
BACKLOG = 6  # requests that wait at any time: more than can run
TICK = 0.25  # seconds a step: a wait of a minute is 240 steps


class Outcome(Enum):
    """What the overload has shown of a request that others, better ones, kept coming before."""

    SERVED = "served"
    STARVED = "not served"
    DEFERRED = "kept out of the queue"
    REFUSED = "refused, so nothing is shown about starvation"
    ALONE = "served, but all that came after it were refused, so nothing is shown about starvation"


class Waited(NamedTuple):
    """What became of a request that had to wait."""

    outcome: Outcome
    num_steps: int | None  # until it had its last token; ``None``: it had not when time was up
    num_refusals: int = 0  # how often it was refused as it came


def wait_in_overload(policy: Any, options: dict[str, Any], limit: int) -> Waited:
    """How long the last of a whole queue waits for its last token, in at most ``limit`` steps.

    It is long, shares nothing, belongs to the user who was served most, wants its answer last and
    has the lowest priority; those that come are short, share their beginning and are urgent. If it
    is refused it comes again before the next step. Each step at most as many come as would fill
    the queue, refused or not, so that this ends whatever the policy says to them.
    """
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
    """An engine with four seats."""
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
    return _request(name, prompt, 20, now, priority=priority, user="greedy", deadline=now + 100.0)


def _short(name: str, now: float) -> AddRequest:
    user = f"user {int(name) % 4}"
    return _request(name, [1, 2, 3, 4, 5, 6], 4, now, user=user, deadline=now + 1.0)


def _request(
    name: str, prompt: list[int], max_tokens: int, now: float, **fields: Any
) -> AddRequest:
    return AddRequest(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        seed=0,
        arrival_time=now,
        max_tokens=max_tokens,
        hints={"output_tokens": max_tokens, "program": fields["user"]},
        **fields,
    )
