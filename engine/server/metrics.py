"""``GET /metrics``: the engine's counters and histograms in Prometheus's format.

Histograms are filled once per step and at the end of requests (``engine.observe.histograms``); all
other values are read when a client requests the metrics. Each metric also has vLLM's name for the
same value, so that dashboards made for vLLM show it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.async_engine import AsyncLLMEngine
from engine.errors import EngineDeadError, EngineError, RestartingError
from engine.messages.requests import FinishedRequest
from engine.messages.stats import AdapterUse, SchedulerStats
from engine.observe.guard import PREFIX as FAILURES
from engine.observe.guard import ObserverGuard
from engine.observe.histograms import (
    NUM_SEQUENCES,
    REQUEST_SECONDS,
    REQUEST_TOKENS,
    SECONDS_BETWEEN_TOKENS,
    Counted,
    Histogram,
)
from engine.server.families import Kind, labelled, single
from engine.server.rank_metrics import rank_metrics
from engine.server.store_metrics import apart_metrics, store_metrics
from engine.server.traffic import Traffic

STATS_SECONDS = 1.0  # timeout for the core's statistics; after that the last known ones are used
FINISH_REASONS = ("stop", "length", "abort", "error", "deadline")
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DRAFTS = "drafts."  # prefix of the counters of speculative decoding in the statistics
PER_PLACE = "num_accepted_tokens_per_pos."


class SchedulerMetric(NamedTuple):
    """A metric that is read from the scheduler's statistics; ``alias``: vLLM's name for it."""

    kind: Kind
    name: str
    alias: str | None
    doc: str
    read: Callable[[SchedulerStats], float]


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
SCHEDULER_METRICS = (
    SchedulerMetric(
        GAUGE,
        "requests_running",
        "num_requests_running",
        "Running requests.",
        lambda stats: stats.num_running,
    ),
    SchedulerMetric(
        GAUGE,
        "requests_waiting",
        "num_requests_waiting",
        "Requests in the queue, or parked until a grammar or a transfer is ready.",
        lambda stats: stats.num_waiting + stats.num_parked,
    ),
    SchedulerMetric(
        GAUGE,
        "kv_usage_ratio",
        "kv_cache_usage_perc",
        "Share of the KV blocks that are in use, 0 to 1.",
        lambda stats: stats.kv_usage,
    ),
    SchedulerMetric(
        GAUGE,
        "queue_blocked",
        None,
        "1 while no request in the queue can start and none is running.",
        lambda stats: bool(stats.blocked),
    ),
    SchedulerMetric(
        COUNTER,
        "prefix_cache_query_tokens",
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        lambda stats: stats.prefix_queries,
    ),
    SchedulerMetric(
        COUNTER,
        "prefix_cache_hit_tokens",
        "prefix_cache_hits",
        "Prompt tokens that were found in the prefix cache.",
        lambda stats: stats.prefix_hits,
    ),
    SchedulerMetric(
        COUNTER,
        "prefix_cache_resets",
        None,
        "Times the prefix cache was emptied on request.",
        lambda stats: stats.num_cache_resets,
    ),
    SchedulerMetric(
        COUNTER,
        "preemptions",
        "num_preemptions",
        "Running requests that were put back into the queue.",
        lambda stats: stats.num_preemptions,
    ),
    SchedulerMetric(
        COUNTER,
        "steps",
        None,
        "Steps of the scheduler.",
        lambda stats: stats.num_steps,
    ),
    SchedulerMetric(
        COUNTER,
        "scheduled_tokens",
        None,
        "Tokens that steps computed.",
        lambda stats: stats.num_scheduled_tokens,
    ),
    SchedulerMetric(
        COUNTER,
        "requests_failed",
        None,
        "Sequences that ended with an error of their own.",
        lambda stats: stats.num_failed,
    ),
    SchedulerMetric(
        COUNTER,
        "requests_expired",
        None,
        "Sequences that reached their timeout.",
        lambda stats: stats.num_expired,
    ),
    SchedulerMetric(
        COUNTER,
        "rescued_steps",
        None,
        "Steps in which the default order replaced the policy's.",
        lambda stats: stats.num_rescued_steps,
    ),
    SchedulerMetric(
        COUNTER,
        "policy_faults",
        None,
        "Errors of the policy and of resources.",
        lambda stats: stats.num_policy_faults,
    ),
    SchedulerMetric(
        COUNTER,
        "step_seconds",
        None,
        "Seconds of computing in steps whose least time is known.",
        lambda stats: stats.step_seconds,
    ),
    SchedulerMetric(
        COUNTER,
        "step_floor_seconds",
        None,
        "Seconds that these steps take at least on this machine.",
        lambda stats: stats.floor_seconds,
    ),
)


class RequestHistograms:
    """Histograms of finished requests, filled by the engine's thread when a request ends."""

    def __init__(self) -> None:
        self.by_name = {
            name: Histogram(bounds) for name, (_, bounds, _) in REQUEST_HISTOGRAMS.items()
        }

    def observe(self, finished: FinishedRequest) -> None:
        for name, value in _values_of(finished):
            self.by_name[name].add(value)


def _values_of(finished: FinishedRequest) -> Iterator[tuple[str, float]]:
    """Yield (histogram name, value) of a request, but no times of stages that it did not reach."""
    metrics, params = finished.metrics, finished.params
    arrival, scheduled = metrics.arrival_time, metrics.scheduled_time
    first, last, end = metrics.first_token_time, metrics.last_token_time, metrics.finished_time
    yield "request_prompt_tokens", finished.num_prompt_tokens
    if end is not None:
        yield "request_seconds", end - arrival
    if scheduled is not None:
        yield "request_queue_seconds", scheduled - arrival
    if finished.pooling is None:
        yield "request_generation_tokens", finished.num_output_tokens
        yield "request_n", params.n
        if params.max_tokens is not None:
            yield "request_max_tokens", params.max_tokens
    elif scheduled is not None and first is not None:
        yield "request_prefill_seconds", first - scheduled
        yield "request_inference_seconds", first - scheduled
    if scheduled is not None and first is not None and last is not None:
        yield "request_prefill_seconds", first - scheduled
        yield "request_decode_seconds", last - first
        yield "request_inference_seconds", last - scheduled
        between = finished.num_output_tokens / params.n - 1
        if between > 0:
            yield "request_seconds_per_token", (last - first) / between


# By our name: vLLM's name, bounds, description.
REQUEST_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...], str]] = {
    "request_prompt_tokens": ("request_prompt_tokens", REQUEST_TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (
        "request_generation_tokens",
        REQUEST_TOKENS,
        "Tokens of an answer, of all its sequences.",
    ),
    "request_n": ("request_params_n", NUM_SEQUENCES, "Sequences that were requested."),
    "request_max_tokens": (
        "request_params_max_tokens",
        REQUEST_TOKENS,
        "Tokens that an answer was allowed.",
    ),
    "request_seconds": (
        "e2e_request_latency_seconds",
        REQUEST_SECONDS,
        "From the arrival of a request to its end.",
    ),
    "request_queue_seconds": (
        "request_queue_time_seconds",
        REQUEST_SECONDS,
        "From the arrival of a request to its start.",
    ),
    "request_prefill_seconds": (
        "request_prefill_time_seconds",
        REQUEST_SECONDS,
        "From the start of a request to its first token.",
    ),
    "request_decode_seconds": (
        "request_decode_time_seconds",
        REQUEST_SECONDS,
        "From the first token of a request to its last.",
    ),
    "request_inference_seconds": (
        "request_inference_time_seconds",
        REQUEST_SECONDS,
        "From the start of a request to its last token.",
    ),
    "request_seconds_per_token": (
        "request_time_per_output_token_seconds",
        SECONDS_BETWEEN_TOKENS,
        "Mean time between the tokens of a request.",
    ),
}


class Metrics(Collector):
    """Metrics of one engine, labelled with the served name of its model."""

    def __init__(
        self, engine: AsyncLLMEngine, model: str, traffic: Traffic, policy: str = ""
    ) -> None:
        self._engine = engine
        self._model = model
        self._policy = policy
        self._traffic = traffic
        self._latencies = engine.measure()
        self._requests = RequestHistograms()
        engine.add_observer(self._requests.observe)
        self._stats: SchedulerStats | None = None
        self._is_up = False
        self._guard = ObserverGuard(engine.failures, "metrics", "GET /metrics fails")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def stats(self) -> SchedulerStats | None:
        """The scheduler's statistics; if it does not respond in time, the last known ones."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self._stats = await self._engine.stats()
            self._is_up = True
        except (TimeoutError, EngineDeadError, RestartingError):
            self._is_up = False
        except EngineError as error:  # a user's own scheduler may raise an error
            self._guard.fail(error)
        return self._stats

    async def text(self) -> bytes | None:
        """The text of ``GET /metrics``; ``None`` if a metric cannot be read."""
        await self.stats()
        return await asyncio.to_thread(self._guard.run, generate_latest, self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._of_server()
        yield from self._of_front_end()
        if self._stats is not None:
            yield from self._of_scheduler(self._stats)
            yield from self._drafts(self._stats)
            yield from store_metrics(self._model, self._stats)
            yield from apart_metrics(self._model, self._stats)
            yield from rank_metrics(self._model, self._stats)

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: their names are only known once the engine has reported them."""
        return ()

    def _of_server(self) -> Iterator[Metric]:
        yield from self._numbers(
            GAUGE, "engine_up", None, "1 if the core answers in time.", self._is_up
        )
        cores = self._engine.num_cores
        for kind, name, doc, value in (
            (GAUGE, "cores", "Cores that the server was started with.", cores.total),
            (GAUGE, "cores_alive", "Cores that have not died, or serve again.", cores.alive),
            (COUNTER, "core_deaths", "Deaths of cores.", cores.deaths),
        ):
            yield from self._numbers(kind, name, None, doc, value)
        for name, place, doc in (
            ("metronome_cores_by_role", 1, "Cores by what they do: prefill or decode."),
            ("metronome_cores_alive_by_role", 0, "Those of them that live."),
        ):
            values = {role: numbers[place] for role, numbers in cores.by_role.items()}
            if values:
                yield self._labelled(GAUGE, name, doc, "role", values)
        in_flight, doc = self._traffic.num_in_flight, "Requests whose answer has not ended."
        yield from self._numbers(GAUGE, "requests_in_flight", None, doc, in_flight)
        responses = CounterMetricFamily(
            "metronome_http_responses",
            "Responses that have begun.",
            labels=["model_name", "path", "status"],
        )
        for (path, status), num in sorted(self._traffic.responses.items()):
            responses.add_metric([self._model, path, str(status)], num)
        yield responses
        doc = "Seconds until a request is refused because the server is full."
        counted = self._traffic.refusals.counted()
        yield from self._histogram("http_refusal_seconds", None, doc, counted)
        blocks, tokens = str(self._engine.num_kv_blocks), str(self._engine.block_size)
        for name, blocks_label in (
            ("metronome_cache_config_info", "num_kv_blocks"),
            ("vllm:cache_config_info", "num_gpu_blocks"),
        ):
            labels = ["model_name", "block_size", blocks_label]
            info = GaugeMetricFamily(name, "The KV pool of a core.", labels=labels)
            info.add_metric([self._model, tokens, blocks], 1)
            yield info
        if self._policy:
            name, labels = "metronome_scheduling_policy_info", ["model_name", "policy"]
            info = GaugeMetricFamily(name, "The scheduling policy.", labels=labels)
            info.add_metric([self._model, self._policy], 1)
            yield info

    def _of_front_end(self) -> Iterator[Metric]:
        counts, latencies = self._engine.counts, self._latencies
        yield from self._numbers(
            COUNTER,
            "prompt_tokens",
            "prompt_tokens",
            "Prompt tokens of requests that have their first token.",
            counts.prompt_tokens,
        )
        yield from self._numbers(
            COUNTER,
            "generation_tokens",
            "generation_tokens",
            "Tokens that were generated.",
            counts.generation_tokens,
        )
        by_reason = {reason: counts.finished[reason] for reason in FINISH_REASONS}
        for name in ("metronome_requests_finished", "vllm:request_success"):
            yield self._labelled(
                COUNTER, name, "Requests by finish reason.", "finished_reason", by_reason
            )
        yield from self._histogram(
            "first_token_seconds",
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            latencies.first_token.counted(),
        )
        yield from self._histogram(
            "between_tokens_seconds",
            "inter_token_latency_seconds",
            "Between two steps that gave a request tokens.",
            latencies.between_tokens.counted(),
        )
        yield from self._histogram(
            "step_tokens",
            "iteration_tokens_total",
            "Tokens of prompts that were finished in a step, and its new tokens.",
            latencies.step_tokens.counted(),
        )
        yield self._labelled(
            COUNTER,
            "metronome_observer_failures",
            "Failures of observers: step log, cache events, profiles, traces and others.",
            "observer",
            self._failures(),
        )
        for name, (alias, _, doc) in REQUEST_HISTOGRAMS.items():
            yield from self._histogram(name, alias, doc, self._requests.by_name[name].counted())

    def _failures(self) -> dict[str, int]:
        """The number of failures of each observer (such as the step log) in all processes."""
        known = {} if self._stats is None else self._stats.counters
        counters = known | self._engine.failures.counters()
        return {
            name.removeprefix(FAILURES): num
            for name, num in counters.items()
            if name.startswith(FAILURES)
        }

    def _of_scheduler(self, stats: SchedulerStats) -> Iterator[Metric]:
        for metric in SCHEDULER_METRICS:
            value = metric.read(stats)
            yield from self._numbers(metric.kind, metric.name, metric.alias, metric.doc, value)
        reasons = {"capacity": stats.num_waiting, "deferred": stats.num_parked}
        for name in ("metronome_requests_waiting_by_reason", "vllm:num_requests_waiting_by_reason"):
            doc = "Waiting requests: for capacity, or until a grammar or a transfer is ready."
            yield self._labelled(GAUGE, name, doc, "reason", reasons)
        yield self._labelled(
            GAUGE,
            "metronome_requests_waiting_by_cause",
            "Waiting requests by why they wait now.",
            "cause",
            stats.waiting_by_cause,
        )
        refused = {"refused": stats.num_refused + self._engine.counts.refused}
        for name in ("metronome_requests_refused", "vllm:admission_rejections"):
            doc = "Requests that were refused: the queue was full, or the policy refused them."
            yield self._labelled(COUNTER, name, doc, "reason", refused)
        in_use = GaugeMetricFamily(
            "metronome_kv_blocks_in_use",
            "KV blocks in use by group of layers. All groups take their blocks from one pool.",
            labels=["model_name", "group", "attention", "window"],
        )
        for index, group in enumerate(stats.kv_groups):
            labels = [self._model, str(index), group.attention, str(group.window)]
            in_use.add_metric(labels, group.num_blocks)
        yield in_use
        if stats.has_snapshots:
            yield from self._snapshots(stats)
        if stats.adapters is not None:
            yield from self._adapters(stats.adapters)
        yield self._labelled(
            COUNTER,
            "metronome_prefix_cache_missed_tokens",
            "Prompt tokens in full blocks that were not found in the prefix cache, by the reason.",
            "reason",
            stats.prefix_missed,
        )
        yield self._labelled(
            COUNTER,
            "metronome_wait_seconds",
            "Seconds in the queue by cause, of requests that have left it.",
            "cause",
            stats.wait_seconds,
        )
        yield self._labelled(
            COUNTER,
            "metronome_hook_seconds",
            "Seconds in the hooks of policy and resources.",
            "hook",
            stats.hook_seconds,
        )
        yield self._labelled(
            COUNTER,
            "metronome_feature_events",
            "Counters of features such as drafts, grammars and adapters.",
            "event",
            {k: num for k, num in stats.counters.items() if not k.startswith(FAILURES)},
        )

    def _snapshots(self, stats: SchedulerStats) -> Iterator[Metric]:
        """The gauges of a model with recurrent states."""
        doc = "Snapshots of recurrent states in the prefix cache."
        yield from self._numbers(GAUGE, "state_snapshots", None, doc, stats.num_snapshots)
        doc = "Share of the KV blocks that hold these snapshots, 0 to 1."
        share = stats.snapshot_usage
        yield from self._numbers(GAUGE, "state_snapshot_usage_ratio", None, doc, share)

    def _adapters(self, use: AdapterUse) -> Iterator[Metric]:
        """The gauges of an engine with LoRA adapters."""
        for name, doc, value in (
            ("adapter_slots", "Adapters that can run at the same time.", use.num_slots),
            ("adapter_slots_used", "Slots of the device with an adapter.", use.num_slots_used),
            ("adapter_host_copies", "Adapters in the host's memory.", use.num_host_copies),
            ("adapter_host_bytes", "Size of these adapters.", use.host_bytes),
        ):
            yield from self._numbers(GAUGE, name, None, doc, value)
        requests = GaugeMetricFamily(
            "metronome_adapter_requests",
            "Unfinished requests of each adapter.",
            labels=["model_name", "adapter", "state"],
        )
        for state, numbers in (("running", use.running), ("waiting", use.waiting)):
            for adapter, num in numbers.items():
                requests.add_metric([self._model, adapter, state], num)
        yield requests
        names = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters that run and wait; the time.", labels=names
        )
        listed = [",".join(numbers) for numbers in (use.waiting, use.running)]
        info.add_metric([str(use.num_slots), *listed], time.time())
        yield info

    def _drafts(self, stats: SchedulerStats) -> Iterator[Metric]:
        """The counters of speculative decoding under vLLM's names."""
        counters = {
            name.removeprefix(DRAFTS): value
            for name, value in stats.counters.items()
            if name.startswith(DRAFTS)
        }
        if not counters:
            return
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            value, doc = counters.get(name, 0), "Speculative decoding."
            yield single(COUNTER, f"vllm:spec_decode_{name}", doc, self._model, value)
        yield self._labelled(
            COUNTER,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            "position",
            {
                name.removeprefix(PER_PLACE): value
                for name, value in counters.items()
                if name.startswith(PER_PLACE)
            },
        )

    def _numbers(
        self,
        kind: Kind,
        name: str,
        alias: str | None,
        doc: str,
        value: float,
    ) -> Iterator[Metric]:
        for each in _names(name, alias):
            yield single(kind, each, doc, self._model, value)

    def _labelled(
        self,
        kind: Kind,
        name: str,
        doc: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        return labelled(kind, name, doc, self._model, label, values)

    def _histogram(
        self, name: str, alias: str | None, doc: str, counted: Counted
    ) -> Iterator[Metric]:
        buckets, so_far = [], 0
        for bound, num in zip([*counted.bounds, float("inf")], counted.counts, strict=True):
            so_far += num
            place = floatToGoString(bound)  # type: ignore[no-untyped-call]
            buckets.append((place, so_far))
        for each in _names(name, alias):
            family = HistogramMetricFamily(each, doc, labels=["model_name"])
            family.add_metric([self._model], buckets, counted.total)
            yield family


def _names(name: str, alias: str | None) -> list[str]:
    return [f"metronome_{name}"] + ([] if alias is None else [f"vllm:{alias}"])
