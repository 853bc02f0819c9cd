"""Nothing is left over that a request could use: tokens of a step, seats, blocks."""

from __future__ import annotations

from engine.messages.step import StepPlan
from engine.sched.interface import PauseState
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler
from engine.sched.step.builder import prefill_cap

# A policy with one of these may well leave something, and so may a resource.
FRUGAL_HOOKS = ("limits", "evict", "order", "next_waiting", "admit", "chunk", "victim", "outranks")


def check_spare(scheduler: Scheduler, plan: StepPlan) -> None:
    """If no plug-in decides which request gets what, all that can be used is used [20]."""
    frugal = scheduler.guard.overrides(*FRUGAL_HOOKS) or scheduler.guard.waiting_may_preempt
    is_paused = scheduler.pause_state is not PauseState.UNPAUSED
    if frugal or is_paused or scheduler.resources.members or type(scheduler) is not Scheduler:
        return
    # What is given back in the middle of a step may come too late for another request.
    if scheduler.view.step.preempted or scheduler.kv.tables.windows:
        return
    left = scheduler.config.max_num_batched_tokens - plan.num_tokens
    if left <= 0:
        return
    counts = dict(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))
    for req in scheduler.roster.running:
        _check_running(scheduler, req, counts.get(req.row, 0), left)
    _check_head(scheduler, left)


def _check_running(scheduler: Scheduler, req: Request, count: int, left: int) -> None:
    """It has all it can compute, unless blocks or a cap on prompts stand against it."""
    behind, config = req.num_uncomputed - (req.num_pending if count else 0), scheduler.config
    if behind <= 0 or not (config.enable_chunked_prefill or behind <= left):
        return
    cap = prefill_cap(config, scheduler.roster)
    if count >= cap:
        return
    least = 1 if config.enable_chunked_prefill else min(behind, left, cap)
    fits = scheduler.kv.fits(req, req.num_computed + least)
    assert not fits, f"{req} got {count} tokens, is {behind} behind, and {left} are left"


def _check_head(scheduler: Scheduler, left: int) -> None:
    """The head of the queue waits for a seat, for blocks, or for a token that is on its way."""
    kv, roster = scheduler.kv, scheduler.roster
    if not len(roster.waiting) or not roster.num_free_seats:
        return
    head = roster.waiting[0]
    if head.num_pending or not (scheduler.config.enable_chunked_prefill or head.num_tokens <= left):
        return
    promised = sum(kv.blocks_for(req.num_tokens + 1) for req in roster.running)
    needed = kv.blocks_for(head.num_tokens) + promised + len(roster.running)
    if roster.running and scheduler.config.watermark is not None:
        needed += int(scheduler.config.watermark * kv.num_blocks)
    assert needed > kv.num_free, f"{head} waits, though seats, blocks and {left} tokens are left"
