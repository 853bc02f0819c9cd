"""Statistics of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounts:
    """Tokens looked up and found, counted when a request is admitted."""

    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0  # lookups of requests that had been preempted
    preempted_hits: int = 0
    num_resets: int = 0  # times the cache was emptied on request

    def add(self, num_tokens: int, num_hit: int, *, preempted: bool) -> None:
        """One admission."""
        if preempted:
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hit
        else:
            self.queries += num_tokens
            self.hits += num_hit
