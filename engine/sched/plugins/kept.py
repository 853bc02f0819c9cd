"""Calls a cache policy, checks its results, and leaves blocks in their usual order if it fails."""

from __future__ import annotations

import logging
from math import isnan
from numbers import Integral, Real
from typing import TYPE_CHECKING

from engine.kv.retention import Keep, Retention, ShelvedPool
from engine.sched.plugins.answers import raised, shown
from engine.sched.request import Request

if TYPE_CHECKING:
    from engine.sched.cache_policy import CachePolicy
    from engine.sched.resource import AttachedScheduler

logger = logging.getLogger("engine.sched")


class GuardedCachePolicy:
    """Wraps a cache policy so that its hook never raises. After an invalid result, blocks stay as
    they were; after more than ``max_policy_faults`` of them, the policy is disabled and the content
    used least recently goes first."""

    def __init__(self, policy: CachePolicy, scheduler: AttachedScheduler) -> None:
        assert isinstance(scheduler.kv.pool, ShelvedPool)
        self._policy = policy
        self._scheduler = scheduler
        self._pool = scheduler.kv.pool
        self._num_faults = 0
        self._pool.most_pinned = int(policy.max_pinned * scheduler.kv.num_usable)
        scheduler.kv.retention = Retention(self._pool, self.keep)

    def keep(self, req: Request, has_ended: bool) -> Keep | None:
        """``CachePolicy.keep``, with plain numbers."""
        if self._num_faults > self._scheduler.config.max_policy_faults:
            return None
        try:
            answer = self._policy.keep(req, has_ended, self._scheduler.view)
            fault = wrong_keep(answer)
            if answer is not None and fault is None:
                most = None if answer.most is None else int(answer.most)
                return Keep(float(answer.priority), float(answer.until), answer.owner, most)
        except Exception as error:  # plug-in code
            fault = raised(error)
        if fault is not None:
            self._fault(fault, req)
        return None

    def _fault(self, what: str, req: Request) -> None:
        name = type(self._policy).__name__
        self._scheduler.report_fault(f"{name}.keep", what, req)
        self._num_faults += 1
        if self._num_faults > self._scheduler.config.max_policy_faults:
            self._pool.forget_all()
            logger.error(
                "cache policy %s is disabled after %d faults; the content used least recently now "
                "goes first",
                *(name, self._num_faults),
            )


def wrong_keep(answer: object) -> str | None:
    """An error text unless ``answer`` is ``None`` or a valid ``Keep``."""
    if answer is None:
        return None
    if not isinstance(answer, Keep):
        return f"returns {shown(answer)}, must be a Keep or None"
    for number in (answer.priority, answer.until):
        if not isinstance(number, Real) or isnan(number):
            return f"returns {shown(answer)}, whose priority and until must be numbers, not NaN"
    if not isinstance(answer.owner, str):
        return f"returns {shown(answer)}, whose owner must be a str"
    if answer.most is not None and not (isinstance(answer.most, Integral) and answer.most >= 0):
        return f"returns {shown(answer)}, whose most must be None or an integer of at least 0"
    return None
