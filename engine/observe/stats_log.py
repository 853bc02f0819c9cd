"""One line of figures every few seconds while there is work, and silence when there is none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0


@dataclass
class TokenCounts:
    """Totals since the engine started, as the front end counts them."""

    prompt_tokens: int = 0
    """Of requests that have their first token."""
    generation_tokens: int = 0
    """Tokens that reached a request."""
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""


class CoreStats(Protocol):
    """What the core knows about itself."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...


class StatsLog:
    """Called after every step; logs when ``seconds`` have passed since the last line."""

    def __init__(
        self,
        counts: TokenCounts,
        core_stats: Callable[[], CoreStats | None],
        clock: Callable[[], float],
        seconds: float = LOG_SECONDS,
    ) -> None:
        self._counts = counts
        self._core_stats = core_stats
        self._clock = clock
        self._seconds = seconds
        self._since: float | None = None  # None: idle
        self._prompt_before = 0
        self._generated_before = 0

    def after_step(self, is_idle: bool) -> None:
        """Log if it is time. An engine that has become idle starts to count anew with new work."""
        now = self._clock()
        if self._since is None:
            self._restart(now)
        elif now - self._since >= self._seconds:
            self._log(now - self._since)
            self._restart(now)
        if is_idle:
            self._since = None

    def _restart(self, now: float) -> None:
        self._since = now
        self._prompt_before = self._counts.prompt_tokens
        self._generated_before = self._counts.generation_tokens

    def _log(self, seconds: float) -> None:
        stats = self._core_stats()
        if stats is None:
            return
        hit_rate = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        logger.info(
            "running %d, waiting %d, prompt %.1f tokens/s, generation %.1f tokens/s, "
            "KV use %.1f %%, prefix hit rate %.1f %%",
            stats.num_running,
            stats.num_waiting,
            (self._counts.prompt_tokens - self._prompt_before) / seconds,
            (self._counts.generation_tokens - self._generated_before) / seconds,
            100.0 * stats.kv_usage,
            100.0 * hit_rate,
        )
