"""What clients and observers read of a request when it starts and when it ends."""

from __future__ import annotations

from typing import NamedTuple

from engine.messages.requests import Finished, FinishReason, Started, code_of
from engine.sched.request import Request


class End(NamedTuple):
    """Why a request ends that is not complete. ``code``: None means that of the reason."""

    req: Request
    reason: FinishReason
    message: str
    code: str | None = None


def start_of(req: Request, index: int, now: float) -> Started:
    """History of a running request; a copy, since it goes on changing."""
    history = req.history
    return Started(
        index,
        history.num_cached,
        history.scheduled_time or now,
        history.num_preempted,
        dict(history.waits),
        list(history.events),
    )


def end_of(
    req: Request,
    index: int,
    reason: FinishReason,
    stop_reason: int | None = None,
    end: End | None = None,
) -> Finished:
    """The end of a request, and what has happened to it; ``end``: of one that is not complete."""
    history = req.history
    return Finished(
        index,
        reason,
        stop_reason,
        "" if end is None else end.message,
        num_preemptions=history.num_preempted,
        waits=history.waits,
        events=history.events,
        kv_transfer_params=history.kv_transfer_params,
        counters=history.counters,
        code=code_of(reason, None if end is None else end.code),
    )
