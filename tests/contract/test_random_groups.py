"""Random cases of the policy lab, computed by ranks in processes of their own: with aborts,
preemption, drafts, grammars, snapshots of states and stages."""

from __future__ import annotations

import os
import random
from functools import partial

import msgspec
import pytest
from support.processes import nothing_left, ranks_of

from engine.core.rank_processes import GroupOptions, start_ranks
from policylab.verify.case import Add, Case, Event, Setup
from policylab.verify.draw import draw_case
from policylab.verify.fake import DigestWorker
from policylab.verify.simulation import Simulation, loses_some, most_drafts, worker_class

OPTIONS = GroupOptions(log_level="error", hang_timeout=30.0)


def make_worker(setup: Setup) -> DigestWorker:
    """The worker of a further rank, in its process."""
    sizes = setup.num_blocks, setup.block_size
    tokens, windows = setup.num_tokens_used, setup.windows
    worker: DigestWorker = worker_class(setup)(*sizes, vocab_size=tokens, windows=windows)
    if setup.snapshot_blocks:
        worker.keep_states(most_drafts(setup), loses_some)
    return worker


def plain(event: Event) -> Event:
    """The event, without what only workers of this process know: content other than tokens, and
    positions that fail."""
    if not isinstance(event, Add):
        return event
    request = msgspec.structs.replace(event.request, cache_salt=None, adapter=None, media=[])
    return msgspec.structs.replace(event, request=request, fails_at=None)


def cases(seed: int, num: int) -> list[Case]:
    """Cases with several ranks, none of which fails."""
    found, seeds = [], random.Random(seed)
    while len(found) < num:
        case = draw_case(seeds.randrange(1 << 30))
        setup = case.setup
        is_simple = not {"tiers", "adapters", "pictures"} & setup.needs.keys()
        if setup.ranks > 1 and setup.rank_fault is None and is_simple:
            found.append(msgspec.structs.replace(case, events=[*map(plain, case.events)]))
    return found


def run(case: Case) -> None:
    setup = case.setup
    with nothing_left() as started:
        makes = [partial(make_worker, setup) for _ in range(1, setup.ranks)]
        ranks = start_ranks(makes, OPTIONS)
        started.update(ranks_of(os.getpid()))
        simulation = Simulation(case, ranks=ranks)
        try:
            simulation.run()
        finally:
            simulation.executor.shutdown()


@pytest.mark.parametrize("num", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_ranks_in_processes_compute_random_cases(num: int, seed: int) -> None:
    for case in cases(seed, num):
        run(case)
