"""For how many identical decode steps a policy need not be called."""

from __future__ import annotations

from math import inf
from typing import Protocol

from engine.sched.plugins.answers import shown
from engine.sched.plugins.hooks import PolicyGuard
from engine.sched.policies import POLICIES
from engine.sched.policy import SchedView
from engine.sched.view import View

# A policy with one of these hooks is called in every step for every request.
BY_ROW_HOOKS = ("order", "chunk", "evict", "on_grant", "on_tokens")

# Shipped policies that rank running requests by arrival, or whose limits are constant.
ALWAYS_STABLE = frozenset(
    POLICIES[name] for name in ("hrrn", "lpm", "mc-sf", "plas", "residual-sjf", "sarathi")
)


class Stable(Protocol):
    """A policy that predicts for how many steps its decisions cannot change. Without this method,
    no step of a policy with ``dynamic``, ``limits`` or ``on_step`` is skipped in a simulation."""

    def stable_for(self, view: SchedView) -> float:
        """The number of coming steps in which the policy's decisions cannot change; ``inf``: any
        number. In these steps each running request gets one token, and none arrives or ends. Ranks
        of running requests, ``limits`` and ``next_waiting`` must stay the same."""
        ...


def stable_steps(guard: PolicyGuard, view: View) -> float:
    """The number of coming decode steps in which the policy need not be called."""
    if guard.is_rerank_due or guard.overrides(*BY_ROW_HOOKS):
        return 0
    if not (guard.dynamic or guard.overrides("limits", "on_step")):
        return inf
    if type(guard.inner) in ALWAYS_STABLE:
        return inf
    if not hasattr(guard.inner, "stable_for"):
        return 0
    return float(guard.call_other("stable_for", wrong_steps, view) or 0)


def wrong_steps(answer: object) -> str | None:
    """What is wrong with an answer of ``stable_for``, as text; ``None`` if it is a number of 0 or
    more."""
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and answer >= 0
    return None if is_number else f"returns {shown(answer)}, must be 0 or more"
