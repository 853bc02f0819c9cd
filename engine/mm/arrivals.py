"""Arrivals: which content of media has come, for requests that are unfinished.

request added ──> its content is awaited ──arrives──> here ──its last request ends──> dropped
                                          └─fault──> the requests for which it came so fail
"""

from __future__ import annotations

from collections.abc import Callable

from engine.messages.requests import Arrival
from engine.sched.request import Request


class Arrivals:
    """Content of media by hash. It stays until the last request that uses it ends, because an
    encoder output may be evicted while a request is preempted."""

    def __init__(self, drop: Callable[[str], object] = lambda key: None) -> None:
        """drop: called with the hash of content that no unfinished request uses."""
        self._drop = drop
        self._users: dict[str, set[str]] = {}  # hash -> ids of unfinished requests
        self._here: set[str] = set()
        self._faults: dict[str, dict[str, Arrival]] = {}  # request id -> by hash
        self._parked: set[str] = set()  # ids of requests that wait for content

    def __len__(self) -> int:
        """Number of media items of unfinished requests."""
        return len(self._users)

    def __contains__(self, key: str) -> bool:
        return key in self._here

    @property
    def has_faults(self) -> bool:
        """True if content cannot come for some unfinished request."""
        return bool(self._faults)

    def add(self, req: Request) -> None:
        """Await the content of a new request's media."""
        for item in req.media:
            self._users.setdefault(item.hash, set()).add(req.request_id)

    def take(self, arrival: Arrival) -> set[str]:
        """Note an arrival. Returns the ids of parked requests that may go on."""
        users = self._users.get(arrival.key)
        if users is None:
            self._drop(arrival.key)
            return set()
        if arrival.fault:
            users = users.intersection(arrival.request_ids)
            for request_id in users:
                self._faults.setdefault(request_id, {})[arrival.key] = arrival
        else:
            self._here.add(arrival.key)
        woken = self._parked & users
        self._parked -= woken
        return woken

    def fault(self, req: Request, key: str) -> Arrival | None:
        """Why content cannot come for this request; ``None`` if it can, or has come."""
        faults = self._faults.get(req.request_id)
        return None if faults is None or key in self._here else faults.get(key)

    def park(self, req: Request) -> None:
        """Note that a request is parked until content arrives."""
        self._parked.add(req.request_id)

    def release(self, req: Request) -> None:
        """Drop what only this request, which has ended, uses."""
        self._faults.pop(req.request_id, None)
        self._parked.discard(req.request_id)
        for key in {item.hash for item in req.media}:
            users = self._users.get(key, set())
            users.discard(req.request_id)
            if not users:
                self._users.pop(key, None)
                self._here.discard(key)
                self._drop(key)
