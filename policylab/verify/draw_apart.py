"""Divides cores of a case with KV tiers into prefill and decode cores, some of which die.

A separate random generator leaves other cases unchanged."""

from __future__ import annotations

from random import Random

import msgspec

from policylab.verify.case import Add, Case, Event, Jump, Kill, Reset
from policylab.verify.tiers import SimulatedTiers

edit = msgspec.structs.replace
SHARE = 0.6  # of cases with KV tiers that can be divided
ONE_CORE = {"adapters", "pictures"}  # simulated resources that other cores do not know of


def with_apart(case: Case, seed: int) -> Case:
    """The case with prefill and decode cores, for a part of the seeds."""
    rng, setup = Random(f"apart of {seed}"), case.setup
    can_be = SimulatedTiers.name in setup.needs and setup.caching and setup.rank_fault is None
    can_be &= not ONE_CORE & setup.needs.keys()
    can_be &= not any(isinstance(event, Jump) and event.seconds < 0 for event in case.events)
    if not can_be or rng.random() >= SHARE:
        return case
    setup = edit(
        setup,
        prefill_cores=rng.choice((1, 1, 2)),
        decode_cores=rng.choice((1, 1, 2)),
        prefill_threshold=rng.choice((1, 2 * setup.block_size, 16)),
    )
    # A reset reaches cores at different times, but their stores at once.
    events: list[Event] = [event for event in case.events if not isinstance(event, Reset)]
    without = rng.random()
    events = [_without_wishes(each) if rng.random() < without else each for each in events]
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 2)):
            core = rng.randrange(setup.prefill_cores + setup.decode_cores)
            at = rng.randrange(case.num_ticks + 1)
            events.append(Kill(at, core, rng.choice((0, 3, 30))))
    return edit(case, setup=setup, events=sorted(events, key=lambda event: event.at))


def _without_wishes(event: Event) -> Event:
    """The event; a request does not say itself how its KV is transferred."""
    if not isinstance(event, Add):
        return event
    return edit(event, request=edit(event.request, kv_transfer_params=None))
