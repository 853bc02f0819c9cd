"""Is a request served though others, better ones by any measure, never cease to come?"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.verify.case import Add, Case, Setup
from engine.verify.simulation import Simulation

VICTIM = "victim"
BACKLOG = 6  # requests that wait at any time: more than can run
TICK = 0.25  # seconds a step: a wait of a minute is 240 steps


class Waited(NamedTuple):
    """Outcome for a request that had to wait."""

    num_steps: int | None  # until it had its last token; ``None``: it had not when time was up
    num_refusals: int = 0  # how often it was refused as it came


def wait_in_overload(policy: Any, options: dict[str, Any], limit: int) -> Waited:
    """How long the last of a whole queue waits for its last token, in at most ``limit`` steps.

    It is long, shares nothing, belongs to the user who was served most, wants its answer last and
    has the lowest priority; those that come are short, share their beginning and are urgent. If it
    is refused it comes again before the next step.
    """
    config = SchedulerConfig(
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_model_len=64,
        scheduling_policy=policy,
        policy_options=options,
        length_predictor="oracle",
    )
    setup = Setup(config=config, num_blocks=33, block_size=4, tick=TICK)
    simulation = Simulation(Case(setup=setup), every=16)
    live, names = simulation.clients.live, map(str, count())
    for _ in range(BACKLOG):
        simulation.happen(Add(at=0, request=_long(next(names), 1, 0.0)))
    is_taken, num_refusals = False, 0
    while simulation.num_steps < limit and (VICTIM in live or not is_taken):
        if not is_taken:
            simulation.happen(Add(at=0, request=_long(VICTIM, 2, simulation.now)))
            is_taken = VICTIM in live
            num_refusals += not is_taken
        counts = simulation.scheduler.get_request_counts()
        for _ in range(BACKLOG - counts.waiting - counts.parked):  # some may be refused
            simulation.happen(Add(at=0, request=_short(next(names), simulation.now)))
        simulation.step()
    is_served = is_taken and VICTIM not in live
    num_steps = simulation.num_steps
    simulation.drain()
    return Waited(num_steps if is_served else None, num_refusals)


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
