"""How many tokens of prompts a step takes.

Whoever decodes waits for the whole step, and a prompt of moderate length takes it several times as
long as its decodes alone. So beside decodes prompts go in small pieces while few tokens wait: six
steps later they are done. What waits beyond that is computed at once, since larger steps end a long
queue sooner for everybody.
"""

from __future__ import annotations

from engine.config.sched import SchedulerConfig
from engine.sched.plugins.hooks import Guard
from engine.sched.request import WATCHED, Request
from engine.sched.roster import Roster
from engine.sched.step.builder import Step

SHAPING_HOOKS = ("limits", "order", "chunk")  # a policy with one of these shapes steps itself
FEW = 6  # steps of such pieces that prompts may wait for


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


def mixed_room(
    req: Request, config: SchedulerConfig, step: Step, roster: Roster, guard: Guard
) -> int:
    """Tokens that a prompt may compute now for the sake of this step's decodes.

    Of a prompt with something to be computed whole, as its resource may demand of a picture, no
    piece may be enough: it is not cut if it comes first. Tokens that a cache holds count among
    those that wait.
    """
    size, taken = config.max_mixed_prefill_tokens, step.num_prompt_tokens
    if not (size and step.has_decodes) or guard.overrides(*SHAPING_HOOKS):
        return config.max_num_batched_tokens
    if not taken and req.table.flags.at[req.row] & WATCHED:
        return config.max_num_batched_tokens
    begun = sum(other.num_uncomputed for other in roster.running_prompts())
    return max(size - taken, roster.queued_tokens + begun - FEW * size)
