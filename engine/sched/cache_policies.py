"""The shipped cache policies."""

from __future__ import annotations

from collections import OrderedDict, deque

from engine.kv.retention import Keep
from engine.sched.cache_policy import CachePolicy
from engine.sched.plugins.checks import require_positive, require_share
from engine.sched.policy import SchedView
from engine.sched.request import Request

MOST_PROGRAMS = 100_000
MOST_PAUSES = 1000


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


class Programs(CachePolicy):
    """Keeps a program's KV over its tool call, for a time that pays.

    ``hints["program"]`` names the program. Of the pauses between two requests of a program, the
    last thousand are known, and how many requests were the last of their program. The time to live
    is one after which the seconds of computing that a return saves exceed the held share of the
    pool, in seconds times ``price``, by most.

    ``price``: 0 keeps for the longest pause known; ``first``: seconds while no pause is known."""

    def __init__(self, price: float = 0.1, first: float = 2.0, max_pinned: float = 0.6) -> None:
        require_positive("price", "first", price=price, first=first)
        require_share(max_pinned=max_pinned)
        self.price, self.first, self.max_pinned = price, first, max_pinned
        self.pauses: deque[float] = deque(maxlen=MOST_PAUSES)
        self.ended: OrderedDict[str, float] = OrderedDict()  # time of the last answer, by program
        self.num_returns = self.num_ends = 0

    def keep(self, req: Request, has_ended: bool, view: SchedView) -> Keep | None:
        program = req.hints.get("program")
        if program is None or not has_ended:
            return None
        left = self.ended.pop(program, None)
        self.num_ends += 1
        if left is not None:
            self.num_returns += 1
            self.pauses.append(max(0.0, req.arrival_time - left))
        self.ended[program] = view.now
        if len(self.ended) > MOST_PROGRAMS:
            self.ended.popitem(last=False)
        return Keep(until=view.now + self.seconds(req, view), owner=str(program))

    def seconds(self, req: Request, view: SchedView) -> float:
        """For how many seconds to keep the request's KV."""
        if not self.pauses:
            return self.first
        saved = view.cost.prefill_seconds(req.num_tokens, 0) - view.cost.step_seconds(0, 0)
        saved *= self.num_returns / self.num_ends
        held = self.price * view.kv.blocks_for(req.num_tokens) / view.kv.num_usable
        best, worth, waited, number = 0.0, 0.0, 0.0, len(self.pauses)
        for place, pause in enumerate(sorted(self.pauses), 1):
            # Kept for ``pause`` seconds: those that return by then are held for less.
            waited += pause
            spent = held * (waited + pause * (number - place)) / number
            if (gain := saved * place / number - spent) > worth:
                best, worth = pause, gain
        return best
