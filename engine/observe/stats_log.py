"""Logs one line of statistics every few seconds while requests run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from engine.messages.stats import SchedulerStats

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0
REQUEST_SECONDS = 1.0  # interval of requests for newer statistics


@dataclass
class TokenCounts:
    """Totals since the engine started, counted by the front end."""

    prompt_tokens: int = 0
    """Prompt tokens of requests that have their first token."""
    generation_tokens: int = 0
    """Output tokens."""
    finished: Counter[str] = field(default_factory=Counter)
    """Number of finished requests by finish reason."""
    refused: int = 0
    """Requests that the front end refused because the queue was full."""


# Counters shown if they have changed since the last line, with their names in the line.
SHOWN_COUNTERS = {
    "num_preemptions": "preempted",
    "num_failed": "failed",
    "num_refused": "refused",
    "num_expired": "expired",
    "num_rescued_steps": "steps rescued from the policy",
    "num_policy_faults": "policy faults",
}


@dataclass
class Snapshot:
    """Values of the counters when the last line was logged."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    wait_seconds: dict[str, float] = field(default_factory=dict)
    prefix_missed: dict[str, int] = field(default_factory=dict)
    hook_seconds: float = 0.0
    step_seconds: float = 0.0
    floor_seconds: float = 0.0


class StatsLog:
    """Logs a line of statistics every ``seconds``, if ``after_step`` is called after each step.

    ``latest_stats``: returns the latest known statistics, without blocking.
    """

    def __init__(
        self,
        counts: TokenCounts,
        latest_stats: Callable[[], SchedulerStats | None],
        clock: Callable[[], float],
        seconds: float = LOG_SECONDS,
    ) -> None:
        self._counts = counts
        self._latest_stats = latest_stats
        self._clock = clock
        self._seconds = seconds
        self._since: float | None = None  # None: idle
        self._requested_at = 0.0
        self._before = Snapshot()

    def after_step(self, is_idle: bool) -> None:
        """Log a line if ``seconds`` have passed since the last line or the last idle period."""
        now = self._clock()
        if self._since is None:
            self._since = now
            self._before.prompt_tokens = self._counts.prompt_tokens
            self._before.generation_tokens = self._counts.generation_tokens
        seconds = now - self._since
        is_due = seconds >= self._seconds
        if is_due or now - self._requested_at >= REQUEST_SECONDS:
            self._requested_at = now
            stats = self._latest_stats()
            if is_due and stats is not None:
                self._log(stats, seconds)
        if is_due:
            self._since = now
        if is_idle:
            self._since = None

    def _log(self, stats: SchedulerStats, seconds: float) -> None:
        before, now = self._before, self._snapshot(stats)
        hit_rate = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        logger.info(
            "running %d, waiting %d, prompt %.1f tokens/s, generation %.1f tokens/s, "
            "KV use %.1f %%, prefix hit rate %.1f %%%s",
            stats.num_running,
            stats.num_waiting,
            (now.prompt_tokens - before.prompt_tokens) / seconds,
            (now.generation_tokens - before.generation_tokens) / seconds,
            100.0 * stats.kv_usage,
            100.0 * hit_rate,
            "".join(f", {part}" for part in _particulars(stats, before, now, seconds)),
        )
        self._before = now

    def _snapshot(self, stats: SchedulerStats) -> Snapshot:
        return Snapshot(
            self._counts.prompt_tokens,
            self._counts.generation_tokens,
            {name: getattr(stats, name) for name in SHOWN_COUNTERS} | stats.counters,
            dict(stats.wait_seconds),
            dict(stats.prefix_missed),
            sum(stats.hook_seconds.values()),
            stats.step_seconds,
            stats.floor_seconds,
        )


def _particulars(
    stats: SchedulerStats, before: Snapshot, now: Snapshot, seconds: float
) -> Iterator[str]:
    """Yield optional parts of the log line, e.g. counters changed since the last line."""
    if stats.num_parked:
        yield f"parked {stats.num_parked}"
    for name, word in SHOWN_COUNTERS.items():
        if news := now.counters[name] - before.counters.get(name, 0):
            yield f"{word} {news}"
    for name in stats.counters:
        if news := now.counters[name] - before.counters.get(name, 0):
            yield f"{name} {news}"
    yield from _of_cache(stats, before, now)
    if waits := _shares(before.wait_seconds, now.wait_seconds):
        yield f"waited for {waits}"
    share = (now.hook_seconds - before.hook_seconds) / seconds
    if share >= 0.005:
        yield f"policy hooks {100.0 * share:.1f} % of the time"
    reached = roofline_share(
        now.floor_seconds - before.floor_seconds, now.step_seconds - before.step_seconds
    )
    if reached is not None:
        yield f"steps at {100.0 * reached:.0f} % of the roofline"
    if stats.blocked:
        yield f"blocked: {stats.blocked}"


def _of_cache(stats: SchedulerStats, before: Snapshot, now: Snapshot) -> Iterator[str]:
    """Yield texts about the KV cache, where there is anything to report: blocks in use by sliding
    window, snapshots of recurrent states, and why prompt tokens were not cached."""
    if len(stats.kv_groups) > 1:
        used: Counter[str] = Counter()
        for group in stats.kv_groups:
            used[f"{group.attention} {group.window or ''}".strip()] += group.num_blocks
        yield f"KV blocks by attention: {', '.join(f'{kind} {n}' for kind, n in used.items())}"
    if stats.has_snapshots:
        share = 100.0 * stats.snapshot_usage
        yield f"snapshots of states {stats.num_snapshots} in {share:.1f} % of the KV blocks"
    missed = _shares(before.prefix_missed, now.prefix_missed)
    if missed and len(now.prefix_missed) > 1:
        yield f"prompt tokens not cached: {missed}"


def roofline_share(floor_seconds: float, seconds: float) -> float | None:
    """Minimum time divided by measured time of steps. ``None`` if nothing was measured, or if the
    result exceeds 1: the minimum is too high if the weights fit into the processor's caches."""
    if seconds <= 0.0 or floor_seconds > seconds:
        return None
    return floor_seconds / seconds


def _shares(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    """The three largest causes since the last line, with their shares in percent, as text.
    ``before``, ``now``: values by cause, such as seconds waited, at the last line and now."""
    news = {cause: seconds - before.get(cause, 0.0) for cause, seconds in now.items()}
    total = sum(news.values())
    largest = sorted(news, key=lambda cause: (-news[cause], cause))[:3]
    shares = [(cause, 100.0 * news[cause] / total) for cause in largest if total > 0]
    return ", ".join(f"{cause} {share:.0f} %" for cause, share in shares if share >= 0.5)
