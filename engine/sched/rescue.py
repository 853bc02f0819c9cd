"""Rescue: nobody got a token, and no step is in flight whose end could change that."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.sched import waits
from engine.sched.builder import Step
from engine.sched.guard import DECIDING
from engine.sched.interface import PauseState

if TYPE_CHECKING:
    from engine.sched.scheduler import Scheduler

logger = logging.getLogger("engine.sched")


def rescue(scheduler: Scheduler, step: Step, has_own_loop: bool, is_stuck: bool) -> None:
    """Serve in the default order, if it was not that already; if nobody can go then, make room.

    Running requests that resources refuse may be refused for a reason that passes: until the engine
    ``is_stuck`` they lose nothing but to one that lacks blocks. Nor does anybody while a transfer
    uses blocks: its end brings some back, or a request that may lose them.
    """
    guard, roster = scheduler.guard, scheduler.roster
    if (has_own_loop or guard.overrides(*DECIDING)) and len(roster.running) + len(roster.waiting):
        _serve_by_default(scheduler, step)
        _count(scheduler, step, has_own_loop)
    if step.has_grants or not (step.short or is_stuck or not len(roster.running)):
        return
    if scheduler.is_transferring and not is_stuck:
        return
    if (holder := roster.lowest_holder()) is not None:
        scheduler.preempt(holder, step, by="the lack of KV blocks")


def _serve_by_default(scheduler: Scheduler, step: Step) -> None:
    """The step again, in the default order."""
    tally = scheduler.settler.tally
    tally.num_steps += 1
    step.reopen(tally.num_steps, scheduler.config.max_num_batched_tokens)
    if scheduler.pause_state is PauseState.PAUSED_NEW:
        step.close(waits.PAUSED)
    scheduler.asked = scheduler.guard.overrule()
    scheduler.serve(scheduler.asked.order(scheduler.view), step)
    scheduler.asked = scheduler.guard


def _count(scheduler: Scheduler, step: Step, has_own_loop: bool) -> None:
    """Steps that were saved are counted, the first of them is told."""
    tally = scheduler.settler.tally
    tally.num_rescued_steps += step.has_grants
    if step.has_grants and tally.num_rescued_steps == 1:
        logger.warning(
            "%s let nobody run though somebody could; such steps are served in the default order "
            "and counted in num_rescued_steps",
            type(scheduler if has_own_loop else scheduler.policy).__name__,
        )
