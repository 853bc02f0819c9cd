"""Records of HTTP requests for the request log. They never contain a prompt or a key, only the
key's short name."""

from __future__ import annotations

from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from engine.messages.requests import FinishedRequest
from engine.server.callers import Caller

LEFT = 499  # status, as in nginx, if the client disconnected before a response began
MAX_PATH = 200  # characters
MIN_WAIT_SECONDS = 0.0005


@dataclass
class RequestRecord:
    """The values that the request log reports about one HTTP request."""

    id: str
    method: str
    path: str
    began: float
    status: int | None = None
    error: str | None = None
    param: str | None = None
    caller: Caller | None = None
    """Who sent it; ``None`` if it was refused before."""
    has_left: bool = False
    """The client disconnected before the end of the response."""
    seconds: float = 0.0
    logged_at: float = 0.0
    """When the request was logged, in seconds since the epoch."""
    first_token_seconds: float | None = None
    adapter: str | None = None
    """Name of the LoRA adapter."""
    num_sequences: int = 0
    """Number of engine requests that have finished."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    finish_reasons: list[str] = field(default_factory=list)
    prefix_ends: list[str] = field(default_factory=list)
    """Why no more of the prompts was found in the prefix cache, each reason once."""
    prefix_evicted: float | None = None
    """Seconds between the eviction of missing blocks and the start, the shortest of all prompts."""

    def add(self, finished: FinishedRequest) -> None:
        """Add the counts and times of a finished engine request; called in the engine's thread."""
        metrics = finished.metrics
        self.adapter = finished.adapter
        self.num_sequences += 1
        self.num_prompt_tokens += finished.num_prompt_tokens
        self.num_cached_tokens += finished.num_cached_tokens
        self.num_output_tokens += finished.num_output_tokens
        self.num_preemptions += metrics.num_preemptions
        for cause, seconds in metrics.waits.items():
            self.waits[cause] += seconds
        if metrics.prefix_end and metrics.prefix_end not in self.prefix_ends:
            self.prefix_ends.append(metrics.prefix_end)
        if metrics.prefix_evicted is not None:
            evicted, known = metrics.prefix_evicted, self.prefix_evicted
            self.prefix_evicted = evicted if known is None else min(evicted, known)
        if finished.finish_reason not in self.finish_reasons:
            self.finish_reasons.append(finished.finish_reason)
        if metrics.first_token_time is not None:
            first = metrics.first_token_time - metrics.arrival_time
            known = self.first_token_seconds
            self.first_token_seconds = first if known is None else min(first, known)

    def fields(self) -> dict[str, Any]:
        """The values that are known, by their names in the JSON log."""
        known: dict[str, Any] = {
            "id": self.id,
            "method": self.method,
            "path": self.path[:MAX_PATH],
            "status": self.status,
        }
        known |= self._sender_fields()
        if self.num_sequences:
            known |= {
                "prompt_tokens": self.num_prompt_tokens,
                "cached_tokens": self.num_cached_tokens,
                "output_tokens": self.num_output_tokens,
            }
        known |= self._prefix_fields()
        if self.first_token_seconds is not None:
            known["first_token_seconds"] = round(self.first_token_seconds, 4)
        known["total_seconds"] = round(self.seconds, 4)
        # A copy, since the engine's thread may still add to it while the log's thread formats it.
        waits = {cause: s for cause, s in self.waits.copy().items() if s >= MIN_WAIT_SECONDS}
        if waits:
            known["waits"] = {cause: round(s, 4) for cause, s in waits.items()}
        if self.num_preemptions:
            known["preemptions"] = self.num_preemptions
        if self.finish_reasons:
            known["finish_reason"] = "+".join(self.finish_reasons)
        if self.error is not None:
            known["error"] = self.error
        if self.param is not None:
            known["param"] = self.param
        if self.has_left:
            known["client_left"] = True
        return known

    def _sender_fields(self) -> dict[str, str]:
        """Who sent it, and to which adapter."""
        known = {} if self.caller is None else self.caller.fields()
        if self.adapter is not None:
            known["adapter"] = self.adapter
        return known

    def _prefix_fields(self) -> dict[str, Any]:
        """Why no more of the prompts was found in the prefix cache."""
        known: dict[str, Any] = {}
        if self.prefix_ends:
            known["prefix_end"] = "+".join(self.prefix_ends)
        if self.prefix_evicted is not None:
            known["prefix_evicted_seconds"] = round(self.prefix_evicted, 4)
        return known


RECORD: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""The record of the HTTP request that the current task answers."""


def note_error(code: str, param: str | None) -> None:
    """Record the error code of the current request, and the field that caused the error."""
    record = RECORD.get()
    if record is not None:
        record.error, record.param = code, param
