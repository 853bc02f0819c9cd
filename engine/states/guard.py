"""Calls a snapshot policy, checks its results, and uses the default policy where it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from numbers import Integral
from typing import Any, TypeVar

from engine.kv.snapshots import KeptSnapshot
from engine.sched.plugins.answers import raised
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler
from engine.states.policy import SnapshotPolicy, SnapshotView, Take

logger = logging.getLogger("engine.states")
Answer = TypeVar("Answer")


class GuardedSnapshotPolicy:
    """Wraps a snapshot policy so that its hooks never raise. Where a hook raises or returns an
    invalid value, the fault is logged and the result of ``default`` is used; after more than
    ``max_policy_faults`` faults, ``default`` decides alone."""

    def __init__(
        self,
        policy: SnapshotPolicy,
        default: SnapshotPolicy,
        view: SnapshotView,
        scheduler: AttachedScheduler,
    ) -> None:
        self._policy = policy
        self._default = default
        self._view = view
        self._scheduler = scheduler
        self._name = type(policy).__name__
        self._num_faults = 0

    def stop(self, req: Request, after: int) -> int | None:
        """``SnapshotPolicy.stop``, an integer."""

        def wrong(answer: object) -> str | None:
            size = self._view.block_size
            is_place = isinstance(answer, Integral) and int(answer) > after
            if answer is None or (is_place and int(answer) % size == 0):  # type: ignore[call-overload]
                return None
            return (
                f"returns {answer!r:.80}, must be None or a multiple of the block size ({size}) "
                f"above {after}"
            )

        stop = self._ask("stop", wrong, req, after, self._view)
        return None if stop is None else int(stop)

    def takes(self, req: Request, num_tokens: int) -> Take:
        """``SnapshotPolicy.takes``."""
        take: Take = self._ask("takes", _wrong_take, req, num_tokens, self._view)
        return take

    def victims(self, num_more: int) -> list[KeptSnapshot]:
        """``SnapshotPolicy.victims``, as a list of snapshots that are cached."""
        answer: list[KeptSnapshot] = self._ask(
            "victims", self._wrong_victims, num_more, self._view, read=self._read
        )
        return answer

    def used(self, known: Sequence[KeptSnapshot]) -> None:
        """``SnapshotPolicy.used``."""
        self._ask("used", _no_check, known, self._view)

    def taken(self, known: Sequence[KeptSnapshot]) -> None:
        """``SnapshotPolicy.taken``."""
        self._ask("taken", _no_check, known, self._view)

    def _ask(
        self,
        hook: str,
        wrong: Callable[[Any], str | None],
        *args: Any,
        read: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """Call a hook of the policy or, if that fails, of the default. ``read``: makes the value to
        check from the result; ``wrong``: returns an error text for an invalid value."""
        policy = self._policy
        if policy is not self._default:
            try:
                answer = read(getattr(policy, hook)(*args))
                fault = wrong(answer)
            except Exception as error:  # plug-in code
                fault = raised(error)
            if fault is None:
                return answer
            self._fault(hook, fault, args[0] if isinstance(args[0], Request) else None)
        return read(getattr(self._default, hook)(*args))

    def _fault(self, hook: str, what: str, req: Request | None) -> None:
        self._scheduler.report_fault(f"{self._name}.{hook}", what, req)
        self._num_faults += 1
        if self._num_faults > self._scheduler.config.max_policy_faults:
            self._policy = self._default
            logger.error(
                "snapshot policy %s is disabled after %d faults; the default policy now decides",
                *(self._name, self._num_faults),
            )

    def _read(self, answer: Any) -> Any:
        """An iterable of snapshots as a list, at most one longer than there are snapshots."""
        most = self._view.num_usable + 1
        return list(islice(answer, most)) if isinstance(answer, Iterable) else answer

    def _wrong_victims(self, answer: object) -> str | None:
        if not isinstance(answer, list):
            return f"returns {answer!r:.80}, must be snapshots"
        for kept in answer:
            if not (isinstance(kept, KeptSnapshot) and self._view.find(kept.block_hash) is kept):
                return f"returns {kept!r:.80}, which is not a snapshot in the cache"
        return None


def _wrong_take(answer: object) -> str | None:
    known = isinstance(answer, Take)
    return None if known else f"returns {answer!r:.80}, must be Take.NO, .UNTIL_NEXT or .STAYS"


def _no_check(answer: object) -> None:
    """Accept any result of a hook whose result is not used."""
