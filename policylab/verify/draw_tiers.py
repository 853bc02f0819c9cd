"""Puts KV tiers into a case: stores with faults, and prompts that are evicted and come again.

A separate random generator leaves other cases unchanged."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from policylab.verify.case import VOCAB_SIZE, Add, Case, Event, Jump, Reset
from policylab.verify.tiers import AWAIT_BLOCKS, PLAIN, STORES, SimulatedTiers

edit = msgspec.structs.replace
SHARE = 0.25  # of cases with KV tiers


def with_tiers(case: Case, seed: int) -> Case:
    """The case with KV tiers, for a part of the seeds."""
    rng = Random(f"tiers of {seed}")
    if rng.random() >= SHARE:
        return case
    stores = [PLAIN if rng.random() < 0.5 else rng.choice(STORES)]
    if rng.random() < 0.5:
        stores.append(rng.choice(STORES))
    setup = edit(
        case.setup,
        caching=rng.random() < 0.95,
        needs={**case.setup.needs, SimulatedTiers.name: rng.choice((2, 6, 40))},  # ticks
        stores=tuple(stores),
    )
    case = edit(case, setup=setup)
    case = with_returns(rng, case) if rng.random() < 0.8 else case
    may_wait = not any(isinstance(event, Jump) and event.seconds < 0 for event in case.events)
    return edit(case, events=[with_wishes(rng, each, may_wait=may_wait) for each in case.events])


def with_wishes(rng: Random, event: Event, *, may_wait: bool) -> Event:
    """The event, sometimes of a request that limits loads, is not stored, or waits for blocks."""
    if not isinstance(event, Add):
        return event
    wishes: dict[str, Any] = {}
    if rng.random() < 0.1:
        wishes["max_load_tokens"] = rng.choice((0, 1, 8))
    if rng.random() < 0.1:
        wishes["store"] = False
    if rng.random() < 0.15 and may_wait:
        wishes[AWAIT_BLOCKS] = rng.choice((0, 2, 20)) / 64
    return edit(event, request=edit(event.request, kv_transfer_params=wishes or None))


def with_returns(rng: Random, case: Case) -> Case:
    """The case with a few prompts that requests begin with, more time between requests, and a pool
    in which only some of these prompts remain."""
    setup = case.setup
    longest = setup.config.max_model_len
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(longest)] for _ in range(rng.randint(2, 6))]
    pace, share = rng.choice((1, 1, 3, 8)), rng.choice((0.5, 0.9, 1.0))
    events: list[Event] = []
    for event in case.events:
        if isinstance(event, Add):
            request = event.request
            size = len(request.prompt_token_ids)
            common = int(size * share) if rng.random() < 0.9 else 0
            prompt = rng.choice(shared)[:common] + request.prompt_token_ids[common:]
            late = (pace - 1) * event.at / 64
            times = ("arrival_time", "deadline", "queue_deadline", "end_deadline")
            moved = {name: getattr(request, name) for name in times}
            moved = {name: time and time + late for name, time in moved.items()}
            event = edit(event, request=edit(request, prompt_token_ids=prompt, **moved))
        events.append(edit(event, at=event.at * pace))
    size = rng.choice((1, 2, 2, 3, 4))
    entries = int(rng.choice((0.6, 0.8, 1.1, 1.6)) * longest / size) + 1
    seats = min(setup.config.max_num_seqs, rng.choice((1, 1, 2, 3, 6)))
    config = replace(setup.config, max_num_seqs=seats)
    groups = len(setup.windows)
    setup = edit(setup, block_size=size, num_blocks=1 + entries * groups, config=config)
    if rng.random() < 0.2:
        some = [event for event in events if rng.random() < 0.3]
        events += [Reset(event.at + rng.randint(1, 4), reset_running=True) for event in some]
        events.sort(key=lambda event: event.at)
    return edit(case, setup=setup, events=events)
