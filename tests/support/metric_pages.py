"""What a server shows at ``/metrics`` for given statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.messages.stats import SchedulerStats


def stats(**fields: Any) -> SchedulerStats:
    """Statistics in which only these fields are not zero."""
    return SchedulerStats(0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, **fields)


class Fixed(Collector):
    """A collector of metrics that are made already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """The metrics."""
        return self._metrics


def page_with(metrics: Iterable[Metric]) -> str:
    """The page that has these metrics."""
    registry = CollectorRegistry()
    registry.register(Fixed([*metrics]))
    return generate_latest(registry).decode()
