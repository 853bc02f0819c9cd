"""Makes metrics with a label for the model."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


def single(kind: Kind, name: str, doc: str, model: str, value: float) -> Metric:
    """A metric with one value."""
    family = kind(name, doc, labels=["model_name"])
    family.add_metric([model], value)
    return family


def labelled(
    kind: Kind, name: str, doc: str, model: str, label: str, values: Mapping[str, float]
) -> Metric:
    """A metric with a value for each value of a label."""
    family = kind(name, doc, labels=["model_name", label])
    for key, value in values.items():
        family.add_metric([model, key], value)
    return family
