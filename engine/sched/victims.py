"""Whom to preempt so that another request gets a seat and room for its tokens."""

from __future__ import annotations

from engine.sched.policy import Policy
from engine.sched.request import Request
from engine.sched.view import View

PAUSED_STEPS = 4  # without an offer, after which a paused request may lose its blocks to any other


def victims_for(req: Request, upto: int, policy: Policy, view: View) -> list[Request] | None:
    """Holders of blocks to evict so that ``req`` can have the positions [0, upto) and a seat.

    ``None``: it cannot be had. Changes nothing: whoever is evicted is evicted for a grant.
    """
    victims: list[Request] = []
    seats = view.step.num_free_seats if req.is_waiting else 0
    if req.is_waiting and not policy.waiting_may_preempt:
        return victims if seats and view.kv.fits(req, upto) else None
    candidates: list[Request] | None = None
    while not (
        (not req.is_waiting or seats + sum(victim.slot >= 0 for victim in victims) > 0)
        and view.kv.fits(req, upto, victims)
    ):
        if candidates is None:
            candidates = _candidates(req, policy, view)
        victim = policy.victim(candidates, req, view) if candidates else None
        if victim is None:
            return None
        candidates.remove(victim)
        victims.append(victim)
    return victims


def _candidates(req: Request, policy: Policy, view: View) -> list[Request]:
    """Holders that ``req`` outranks and that were not offered in this step.

    One that its policy has paused for long is a candidate whatever its rank.
    """
    index = view.step.index
    return [
        other
        for other in view.holders
        if other.considered != index
        and other is not req
        and (other.considered < index - PAUSED_STEPS or policy.outranks(req, other))
    ]
