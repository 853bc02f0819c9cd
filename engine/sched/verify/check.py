"""What a legal plan and a legal state are. Every test runs with these on."""

from __future__ import annotations

import numpy as np

from engine.messages.step import StepPlan
from engine.sched.request import Status
from engine.sched.scheduler import Scheduler


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Budgets and single writers of one step."""
    config, table = scheduler.config, scheduler.roster.table
    assert plan.num_tokens == int(plan.counts.sum()) <= config.max_num_batched_tokens
    assert len(plan.rows) <= config.max_num_seqs
    assert (plan.counts > 0).all(), "a scheduled row has no tokens"
    assert len(set(plan.rows.tolist())) == len(plan.rows), "a row is scheduled twice"
    assert len(set(plan.slots.tolist())) == len(plan.slots), "two rows share a slot"
    upto = plan.starts + plan.counts
    assert (upto <= scheduler.kv.num_held[plan.rows] * scheduler.kv.block_size).all()
    assert (upto < table.limit.all[plan.rows]).all(), "computes what nobody will read"
    written: set[int] = set()
    for row, start, end in zip(plan.rows, plan.starts, upto, strict=True):
        req = scheduler.roster.by_row[int(row)]
        assert req is not None
        assert req.status is Status.RUNNING, f"{req} is scheduled"
        first, last = int(start) // scheduler.kv.block_size, int(end - 1) // scheduler.kv.block_size
        blocks = set(scheduler.kv.held(req)[first : last + 1])
        assert written.isdisjoint(blocks), "two rows write one block"
        assert all(scheduler.kv.pool.num_refs[b] == 1 or _is_full(scheduler, b) for b in blocks)
        written |= blocks


def _is_full(scheduler: Scheduler, block: int) -> bool:
    """Shared within this step: published, so its writer fills it now and twins only read."""
    return scheduler.kv.cache.hash_of(block) is not None


def check_state(scheduler: Scheduler) -> None:
    """Conservation of blocks, reference counts, membership and seats."""
    kv, roster = scheduler.kv, scheduler.roster
    pool = kv.pool
    refs = [0] * pool.num_blocks
    for req in roster.by_id.values():
        blocks = [b for g in range(kv.num_groups) for b in kv.held(req, g) if b]
        assert len(set(blocks)) == len(blocks), f"{req} holds a block twice"
        assert int(kv.num_held[req.row]) == len(kv.held(req))
        for block in blocks:
            refs[block] += 1
        if req.status is not Status.RUNNING and req.request_id not in roster.holding:
            assert not blocks, f"{req} holds blocks"
    for loan in kv.transfers.lent.values():
        for block in loan.blocks:
            refs[block] += 1
    assert refs == pool.num_refs, "reference counts differ from tables and loans"
    free = pool.free_order()
    assert len(free) == pool.num_free == len(set(free))
    assert sorted(free) == [b for b in range(1, pool.num_blocks) if refs[b] == 0]
    members = [*roster.running, *roster.waiting, *roster.parked.values()]
    assert sorted(map(id, members)) == sorted(map(id, roster.by_id.values()))
    assert len(roster.running) <= scheduler.config.max_num_seqs
    seats = [req.slot for req in roster.running]
    assert len(set(seats)) == len(seats)
    assert roster.num_free_seats == scheduler.config.max_num_seqs - len(seats)
    ranks = [(*req.rank, req.arrival) for req in roster.running]
    assert ranks == sorted(ranks)
    table = roster.table
    for req in roster.by_id.values():
        assert req.num_tokens == len(req.tokens)
        assert 0 <= req.num_computed <= req.num_tokens + req.num_pending
        assert 0 <= req.num_pending <= table.in_flight.at[req.row]


def check_empty(scheduler: Scheduler) -> None:
    """Nobody is left: everything is free again."""
    check_state(scheduler)
    assert not scheduler.roster.by_id
    assert scheduler.num_in_flight == 0
    assert scheduler.kv.pool.num_free == scheduler.kv.num_usable
    assert not np.any(scheduler.roster.table.alive.all)
    assert all(req is None for req in scheduler.roster.by_row)
