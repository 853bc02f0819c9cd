"""How many tokens of prompts a step takes.

Whoever decodes waits for the whole step, and two short prompts at once may well take it three times
as long as its decodes alone. So beside decodes prompts go one after another, as long as few tokens
wait; the later ones lose little, as the earlier ones are done sooner. Once many wait, larger steps
end the queue sooner for everybody, and the step's budget is the only bound.
"""

from __future__ import annotations

from engine.config.sched import SchedulerConfig
from engine.sched.plugins.hooks import Guard
from engine.sched.roster import Roster
from engine.sched.step.builder import Step

SHAPING_HOOKS = ("limits", "order", "chunk")  # a policy with one of these shapes steps itself
FEW = 6  # steps' worth of prompts that may wait while they go one after another


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


def waits_for_decodes(
    behind: int, config: SchedulerConfig, step: Step, roster: Roster, guard: Guard
) -> bool:
    """Is a prompt with so many tokens left to a later step, for the sake of this step's decodes?

    Never the first one of a step. Prompts that a cache holds count whole among those that wait.
    """
    size, taken = config.max_mixed_prefill_tokens, step.num_prompt_tokens
    if not (size and taken and step.has_decodes) or taken + behind <= size:
        return False
    if guard.overrides(*SHAPING_HOOKS):
        return False
    begun = sum(req.num_uncomputed for req in roster.running_prompts())
    return roster.queued_tokens + begun <= FEW * size
