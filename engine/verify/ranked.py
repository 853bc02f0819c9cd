"""Blocks go by rank: no request lacks them while one that it outranks computes tokens."""

from __future__ import annotations

from engine.messages.step import StepPlan
from engine.sched.request import Request
from engine.sched.roster import by_rank
from engine.sched.scheduler import Scheduler


def check_ranked(scheduler: Scheduler, plan: StepPlan) -> None:
    """No running request went without tokens for lack of blocks, or was preempted in this step,
    while one that it outranks was granted tokens and held enough blocks for it [21].

    A policy that says in which order tokens are offered, or whom to evict, answers for that itself.
    """
    step, guard = scheduler.view.step, scheduler.guard
    if type(scheduler) is not Scheduler or guard.overrides("order") or not plan.num_tokens:
        return
    granted = scheduler.roster.requests(plan.rows)
    if guard.waiting_may_preempt:  # ``outranks`` was called while these waited
        granted = [req for req in granted if req not in step.new]
    if not guard.overrides("victim"):
        for req in step.short:
            _check(scheduler, req, granted)
    if not guard.overrides("victim", "evict"):
        for req in step.preempted:
            _check(scheduler, req, granted)


def _check(scheduler: Scheduler, req: Request, granted: list[Request]) -> None:
    lower = [other for other in granted if is_lower(scheduler, req, other)]
    start = req.num_computed if req.slot >= 0 else scheduler.kv.ready(req)
    least = 1 if scheduler.config.enable_chunked_prefill else req.num_uncomputed
    enough = bool(lower) and scheduler.kv.fits(req, start + least, lower)
    assert not enough, f"{req} lacks blocks, though it outranks {lower}, which were granted"


def is_lower(scheduler: Scheduler, req: Request, other: Request) -> bool:
    """Does the request outrank the other one, by rank and in the policy's own words?"""
    return by_rank(req) < by_rank(other) and scheduler.guard.outranks(req, other)
