"""How many tokens and seats a step has, and how many of them one prompt may take."""

from __future__ import annotations

from engine.config.sched import SchedulerConfig
from engine.sched.interface import PauseState
from engine.sched.policy import Limits
from engine.sched.state import waits
from engine.sched.state.roster import Roster
from engine.sched.step.builder import Step


def limit(step: Step, limits: Limits, pause: PauseState, *, may_preempt: bool) -> None:
    """Apply the bounds of policy and pause. ``may_preempt``: waiting requests need no free seat."""
    if limits.max_tokens is not None:
        step.tokens_left = min(step.tokens_left, int(limits.max_tokens))
    if limits.max_seqs is not None:
        step.max_seqs = min(step.max_seqs, int(limits.max_seqs))
    if pause is PauseState.PAUSED_ALL:
        step.tokens_left = 0
    if pause is not PauseState.UNPAUSED:
        step.close(waits.PAUSED)
    elif not limits.admission:
        step.close(waits.POLICY)
    elif not (step.num_free_seats or may_preempt):
        step.close(waits.SEATS)


def prefill_cap(config: SchedulerConfig, roster: Roster) -> int:
    """Cap on one prompt's tokens in this step: none for a request that is alone."""
    threshold = config.long_prefill_token_threshold
    if not threshold or not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    competing = len(roster.running) + len(roster.waiting)
    if competing <= 1:
        return config.max_num_batched_tokens
    if config.long_prefill_token_threshold_adaptive:
        return max(threshold, config.max_num_batched_tokens // competing)
    return threshold
