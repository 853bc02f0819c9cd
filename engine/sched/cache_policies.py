"""The shipped cache policies, besides `Programs` (`engine.sched.policies.continuum`)."""

from __future__ import annotations

from engine.kv.retention import Keep
from engine.sched.cache_policy import CachePolicy
from engine.sched.plugins.checks import require_share
from engine.sched.policy import SchedView
from engine.sched.request import Request


class LRU(CachePolicy):
    """The content used least recently goes first, as without a cache policy. It switches off the
    cache policy of a scheduling policy that has one."""

    def keep(self, req: Request, has_ended: bool, view: SchedView) -> Keep | None:
        return None


class Shares(CachePolicy):
    """No user keeps more than a share of the pool in the cache while others need room.

    Above ``share`` (0 to 1), the blocks that a user left first are taken before all others."""

    def __init__(self, share: float = 0.25) -> None:
        require_share(share=share)
        self.share = share

    def keep(self, req: Request, has_ended: bool, view: SchedView) -> Keep | None:
        return Keep(owner=req.user, most=int(self.share * view.kv.num_usable))
