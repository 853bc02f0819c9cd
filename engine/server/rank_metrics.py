"""Metrics of the ranks that compute a model together."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from engine.messages.stats import SchedulerStats

LABELS = ["model_name", "core", "rank"]
# By the name of a field of ``RankUse``: the name of its metric, and what it counts.
OF_RANK = {
    "step_seconds": ("rank_step_seconds", "Seconds of a rank in steps."),
    "wait_seconds": (
        "rank_wait_seconds",
        "Seconds of these in which it waited for other ranks in operations of all.",
    ),
    "stage_wait_seconds": (
        "rank_stage_wait_seconds",
        "Seconds in which it waited for hidden states of another stage of a pipeline.",
    ),
}


def rank_metrics(model: str, stats: SchedulerStats) -> Iterator[Metric]:
    """The metrics of an engine whose cores have several ranks; nothing for others."""
    if not stats.ranks:
        return
    for field, (name, doc) in OF_RANK.items():
        family = CounterMetricFamily(f"metronome_{name}", doc, labels=LABELS)
        for use in stats.ranks:
            family.add_metric([model, str(use.core), str(use.rank)], getattr(use, field))
        yield family
