"""Metrics of stores of KV blocks, and of prompts that cores of their own compute."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily as Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from engine.messages.stats import SchedulerStats
from engine.server.families import labelled, single

KV_LOAD, APART = "kv load.", "prefill apart."  # prefixes of counters in the statistics
# By the name of a counter: that of its metric, and what it counts.
OF_STORE = {
    "hits": ("hit_blocks", "Blocks that new requests could use and this store had."),
    "loads": ("loads", "Loads for which blocks were read."),
    "blocks_loaded": ("loaded_blocks", "Blocks that were loaded into the KV pool."),
    "bytes_loaded": ("loaded_bytes", "Size of these blocks."),
    "stored": ("stored_blocks", "Blocks that the store has kept."),
    "skipped": ("skipped_blocks", "Blocks that were not stored, since too many waited."),
    "errors": ("errors", "Calls of the store that failed, gave wrong answers or took too long."),
    "left_out": ("left_out", "Times a core has ceased to use the store after failures."),
}
SHARED = {
    "misses": ("kv_store_missed_blocks", "Such blocks that no store had."),
    "blocks_failed": (
        "kv_store_failed_blocks",
        "Blocks that stores had and did not supply; their tokens were computed.",
    ),
}


def store_metrics(model: str, stats: SchedulerStats) -> Iterator[Metric]:
    """The metrics of an engine with stores; nothing for one without."""
    if not stats.stores:
        return
    uses, counts = stats.stores, stats.counters
    for name, doc, values in (
        ("blocks", "Blocks in the store.", {key: use.num_blocks for key, use in uses.items()}),
        ("bytes", "Size of these blocks.", {key: use.num_bytes for key, use in uses.items()}),
        (
            "cores",
            "Cores that use the store: not those that it has failed several times.",
            {key: use.num_cores for key, use in uses.items()},
        ),
    ):
        yield labelled(GaugeMetricFamily, f"metronome_kv_store_{name}", doc, model, "store", values)
    for counter, (name, doc) in OF_STORE.items():
        values = {store: counts.get(f"{KV_LOAD}{store}.{counter}", 0) for store in uses}
        yield labelled(Counter, f"metronome_kv_store_{name}", doc, model, "store", values)
    for counter, (name, doc) in SHARED.items():
        yield single(
            Counter,
            f"metronome_{name}",
            doc,
            model,
            counts.get(f"{KV_LOAD}{counter}", 0),
        )


def apart_metrics(model: str, stats: SchedulerStats) -> Iterator[Metric]:
    """The metrics of prompts that prefill cores compute; nothing if there are no such cores."""
    found = {
        name.removeprefix(APART): num
        for name, num in stats.counters.items()
        if name.startswith(APART)
    }
    if not found:
        return
    seconds = found.pop("milliseconds", 0) / 1000
    doc = (
        "Prompts given to prefill cores: sent; done, failed, aborted; requests whose blocks did "
        "not come in time (given_up)."
    )
    yield labelled(Counter, "metronome_prefills_apart", doc, model, "event", found)
    doc = "Seconds from the sending of a prompt to a prefill core to its end there."
    yield single(Counter, "metronome_prefill_apart_seconds", doc, model, seconds)
