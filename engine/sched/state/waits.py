"""Why requests wait: every second in the queue is charged to exactly one cause.

The cost is O(1) a step: between two plans all waiting requests share one cause, whatever closed the
queue in the earlier one. One running total per cause is kept; a request remembers the totals of the
moment it entered and takes the difference when it leaves. Only those that were offered and refused
by themselves, or that wait for something of their own, are charged one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.sched.request import Request

TOKENS = "token budget"
SEATS = "seats"
BLOCKS = "KV blocks"
POLICY = "policy order"
PAUSED = "paused"
FAILED_LOAD = "failed load"  # within the step: more is to be computed than it was offered
PREEMPTED = "preempted"  # by whom follows
NEXT_STEP = "next step"  # it waits only for the next plan


class WaitLedger:
    """Charges the waiting time of requests, in seconds."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}  # of requests that have left the queue
        self._totals: dict[str, float] = {}
        self._cause = NEXT_STEP  # of the time since the last plan
        self._since = 0.0
        self._refused: dict[int, tuple[Request, str]] = {}  # by row: its own cause since then

    def enter(self, req: Request, now: float, own: str | None = None) -> None:
        """The request begins to wait. With an ``own`` cause, all of the wait is charged to that."""
        req.history.wait_from = now
        req.history.own_cause = own
        if own is None:
            req.history.totals_at_entry = self._totals_at(now)

    def leave(self, req: Request, now: float) -> None:
        """It waits no longer, or for something else."""
        history = req.history
        waited = now - history.wait_from
        if history.own_cause is not None:
            charges = {history.own_cause: waited}
        else:
            before, after = history.totals_at_entry, self._totals_at(now)
            charges = {cause: total - before.get(cause, 0.0) for cause, total in after.items()}
            if req.row in self._refused:
                self._charge_own(req, now)
                del self._refused[req.row]
        for cause, seconds in charges.items():
            if seconds:
                history.waits[cause] = history.waits.get(cause, 0.0) + seconds
        history.queue_seconds += waited

    def close(self, now: float, cause: str, refused: Iterable[tuple[Request, str]]) -> None:
        """A plan was made: until the next one, requests in the queue wait for this cause."""
        for req, _ in self._refused.values():
            self._charge_own(req, now)
        self._totals = self._totals_at(now)
        self._cause, self._since = cause, now
        self._refused = {
            req.row: (req, why)
            for req, why in refused
            if why != cause and req.is_waiting and req.history.own_cause is None
        }

    def add_up(self, waits: dict[str, float]) -> None:
        """A request has ended; its waits go into the sums."""
        for cause, seconds in waits.items():
            kind = PREEMPTED if cause.startswith(PREEMPTED) else cause  # by whom is its own history
            self.sums[kind] = self.sums.get(kind, 0.0) + seconds

    def _totals_at(self, now: float) -> dict[str, float]:
        if now == self._since:
            return self._totals
        totals = dict(self._totals)
        totals[self._cause] = totals.get(self._cause, 0.0) + now - self._since
        return totals

    def _charge_own(self, req: Request, now: float) -> None:
        """Move this interval's charge from the common cause to the request's own."""
        history, (_, cause) = req.history, self._refused[req.row]
        seconds = now - self._since
        for name, change in ((cause, seconds), (self._cause, -seconds)):
            history.waits[name] = history.waits.get(name, 0.0) + change
