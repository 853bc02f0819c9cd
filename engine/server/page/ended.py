"""Remembers for some minutes why requests that have ended had to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.messages.requests import FinishedRequest
from engine.server.page.owners import HTTP_REQUEST, HttpRequest, Viewer
from engine.server.page.shown import rounded, shown_waits

MOST_ENDED = 5000  # requests of one key
KEEP_SECONDS = 600.0


@dataclass
class Ended:
    """An HTTP request whose sequences have ended, or some of them."""

    http: HttpRequest
    at: float
    core: int | None
    waits: dict[str, float] = field(default_factory=dict)
    first_token: float | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0

    def add(self, finished: FinishedRequest) -> None:
        """Add the times and counts of a finished request of the engine."""
        metrics = finished.metrics
        for cause, seconds in metrics.waits.items():
            self.waits[cause] = self.waits.get(cause, 0.0) + seconds
        if metrics.first_token_time is not None:
            first = metrics.first_token_time - metrics.arrival_time
            self.first_token = first if self.first_token is None else min(first, self.first_token)
        self.num_prompt += finished.num_prompt_tokens
        self.num_cached += finished.num_cached_tokens
        self.num_output += finished.num_output_tokens

    def document(self, viewer: Viewer) -> dict[str, Any]:
        """What the page shows of it."""
        return {
            "id": self.http.id,
            "state": "ended",
            "waited": shown_waits(self.waits, viewer),
            "first_token": None if self.first_token is None else rounded(self.first_token),
            "prompt": self.num_prompt,
            "cached": self.num_cached,
            "output": self.num_output,
            "core": self.core,
        }


class EndedRequests:
    """The requests of each key that have ended lately, by their ids. If an id is used again, the
    later request counts.

    Each key has its own limit, so that it cannot notice the requests of others."""

    def __init__(
        self,
        core_of: Callable[[str], int | None],
        *,
        most: int = MOST_ENDED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """core_of: the core of a request by the engine's id, ``None`` if it is not known."""
        self._core_of = core_of
        self._most = most
        self._clock = clock
        # Both the oldest first, owners by their latest request.
        self._by_owner: dict[bytes, dict[str, Ended]] = {}
        self._lock = threading.Lock()

    def observe(self, finished: FinishedRequest) -> None:
        """Remember a finished request of the engine; called in the engine's thread, in the context
        of its HTTP request."""
        http = HTTP_REQUEST.get()
        if http is None:
            return
        with self._lock:
            own = self._by_owner[http.owner] = self._by_owner.pop(http.owner, {})
            ended = own.pop(http.id, None)
            if ended is None or ended.http is not http:
                ended = Ended(http, 0.0, self._core_of(finished.request_id))
            ended.at = self._clock()
            ended.add(finished)
            own[http.id] = ended
            self._forget(own)
            self._forget_owners()

    def find(self, request_id: str, viewer: Viewer) -> Ended | None:
        """The latest request with this id that the viewer may see."""
        with self._lock:
            owners = list(self._by_owner) if viewer is None else [viewer]
            for owner in owners:
                self._forget(self._by_owner.get(owner, {}))
            found = [self._by_owner.get(owner, {}).get(request_id) for owner in owners]
        return max((each for each in found if each), key=lambda each: each.at, default=None)

    def _forget_owners(self) -> None:
        """Remove keys without late requests, such as those that are no longer valid."""
        while self._by_owner:
            oldest = next(iter(self._by_owner))
            self._forget(own := self._by_owner[oldest])
            if own:
                break
            del self._by_owner[oldest]

    def _forget(self, own: dict[str, Ended]) -> None:
        before = self._clock() - KEEP_SECONDS
        while own:
            oldest = next(iter(own))
            if len(own) <= self._most and own[oldest].at >= before:
                break
            del own[oldest]
