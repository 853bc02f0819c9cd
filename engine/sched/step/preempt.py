"""Chooses requests to preempt, and how many free blocks a request may take."""

from __future__ import annotations

from engine.sched.policy import Policy
from engine.sched.request import Request
from engine.sched.view import View

PAUSED_STEPS = 4  # a request paused for this many steps may be preempted for any other


def victims_for(req: Request, upto: int, policy: Policy, view: View) -> list[Request] | None:
    """Choose requests to preempt so that ``req`` gets a seat and blocks for its first ``upto``
    tokens.

    Returns ``None`` if preemption cannot free enough. The caller must preempt the chosen requests.
    """
    victims: list[Request] = []
    seats = view.step.num_free_seats if req.is_waiting else 0
    spared = reserved_blocks(req, policy, view)
    if req.is_waiting and not policy.waiting_may_preempt:
        return victims if seats and view.kv.fits(req, upto, spared=spared) else None
    candidates: list[Request] | None = None
    while not (
        (not req.is_waiting or seats + len(victims) > 0)
        and view.kv.fits(req, upto, victims, spared=spared)
    ):
        if candidates is None:
            candidates = _candidates(req, policy, view)
        victim = policy.victim(candidates, req, view) if candidates else None
        if victim is None:
            return None
        candidates.remove(victim)
        victims.append(victim)
    return victims


def reserved_blocks(req: Request, policy: Policy, view: View) -> int:
    """Number of free blocks that a waiting ``req`` must leave to running prompts. 0 if a watermark
    is configured, or if there are too few blocks for all and ``keeps_headroom`` is False."""
    if not req.is_waiting or view.config.watermark is not None:
        return 0
    kv = view.kv
    if not (promised := _promised_to_others(req, policy, view)):
        return 0
    is_contested = promised + kv.missing(req, req.num_tokens) > kv.num_free
    return 0 if is_contested and not view.keeps_headroom else promised


def _promised_to_others(req: Request, policy: Policy, view: View) -> int:
    """Blocks still needed by those running prompts that the waiting ``req`` may not preempt."""
    if not (prompts := view.prompts):
        return 0
    if policy.waiting_may_preempt:
        prompts = [other for other in prompts if not policy.outranks(req, other)]
    return view.promised_to(prompts)


def cut_to_blocks(req: Request, num_tokens: int, policy: Policy, view: View) -> int:
    """Limit a running request's next ``num_tokens`` tokens to the KV blocks it can get; at least 1.

    A prompt chunk is cut only if preemption cannot free enough blocks. Drafts are cut if their
    blocks would be needed by other requests.
    """
    kv, start = view.kv, req.num_computed
    num_held, size = int(kv.num_held[req.row]), kv.block_size
    if start + num_tokens <= num_held * size:
        return num_tokens
    if req.num_uncomputed == 1:
        num_entries = -(-(start + num_tokens) // size) - num_held
        room = size * -(-(start + 1) // size)
        return min(num_tokens, room - start) if view.is_short(num_entries) else num_tokens
    room = kv.room(req)
    if start + num_tokens <= room:
        return num_tokens
    if kv.fits(req, start + num_tokens, _candidates(req, policy, view)):
        return num_tokens
    return min(num_tokens, (room if room > start else room + size) - start)


def _candidates(req: Request, policy: Policy, view: View) -> list[Request]:
    """Running requests that ``req`` may preempt: they were not offered tokens in this step.

    Every one that was offered none for ``PAUSED_STEPS`` steps is included.
    """
    may_take = policy.outranks if req.is_waiting else policy.takes_blocks
    considered, index = req.table.considered.at, view.step.index
    return [
        other
        for other in view.running
        if (last := considered[other.row]) != index
        and other is not req
        and (last < index - PAUSED_STEPS or may_take(req, other))
    ]
