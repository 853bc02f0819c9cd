"""CachePolicy: decides which free KV blocks keep their content longest."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.kv.retention import Keep
from engine.sched.policy import API_VERSION, SchedView
from engine.sched.request import Request


class CachePolicy(ABC):
    """Base class of cache policies. A policy reads the view and changes only its own fields.

    Without a cache policy, the content used least recently goes first. A ``Policy`` that is also a
    ``CachePolicy`` needs no option ``cache_policy``.

    To give the same plans in a replay, decisions must use no clock but ``view.now`` and no random
    numbers but ``view.rng``."""

    api_version = API_VERSION  # the API version it was written for; a plug-in may pin a number
    max_pinned: float = 0.5
    """Share of the pool's blocks, 0 to 1, that may be pinned. Above it, only the first blocks of a
    request are. Read once, at the start."""

    @abstractmethod
    def keep(self, req: Request, has_ended: bool, view: SchedView) -> Keep | None:
        """How to keep the blocks that the request is about to give back, since it has ended
        (``has_ended``) or is preempted. Only blocks with full, computed content can be kept.
        ``None``: as they were; blocks that no ``Keep`` has placed are ordinary.

        It is called before ``Policy.on_finish`` and after ``Policy.on_preempt``; the request still
        has its blocks (``view.kv.held(req)``)."""
