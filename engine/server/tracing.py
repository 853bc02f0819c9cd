"""OpenTelemetry tracing: a span for each request, made when the request ends. The request's header
``traceparent`` names the parent span."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from urllib.parse import urlsplit

from opentelemetry.context import attach, detach
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.async_engine import AsyncLLMEngine
from engine.errors import ConfigError
from engine.messages.params import SamplingParams
from engine.messages.requests import FinishedRequest
from engine.observe.guard import ObserverGuard
from engine.server.answers import OURS
from engine.server.ollama.paths import OLLAMA_PATHS
from engine.server.pooled.paths import POOLED_PATHS

SERVICE = "metronome"
END_SECONDS = 2.0  # for sending the last spans at shutdown
TRACE_HEADERS = ("traceparent", "tracestate")
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    **OLLAMA_PATHS,
    **POOLED_PATHS,
}
OPERATION: ContextVar[str] = ContextVar("operation")


class Tracing:
    """Sends spans to a collector in a thread of its own. Spans that it cannot send in time are
    dropped; no request waits for them."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: the collector's full URL. Raises ``ConfigError`` if it is malformed."""
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r:.200}, must be a URL such as "
                "http://127.0.0.1:4318/v1/traces"
            )
        self._endpoint = endpoint
        self._provider: TracerProvider | None = None

    def begin(self, engine: AsyncLLMEngine, model: str, app: ASGIApp) -> ASGIApp:
        """Trace the engine's requests. Returns ``app`` with a middleware for ``traceparent``."""
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # not configured
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        effect = f"spans are dropped while {self._endpoint} does not accept them"
        exporter = GuardedExporter(
            OTLPSpanExporter(self._endpoint), ObserverGuard(engine.failures, "traces", effect)
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        engine.add_observer(Spans(self._provider, model))
        return WithParent(app)

    def end(self) -> None:
        """Send the remaining spans, for at most ``END_SECONDS``."""
        if self._provider is not None:
            ending = threading.Thread(target=self._provider.shutdown, daemon=True)
            ending.start()
            ending.join(END_SECONDS)


class GuardedExporter(SpanExporter):
    """Exports spans with another exporter, whose failures are counted and logged once."""

    def __init__(self, inner: SpanExporter, guard: ObserverGuard) -> None:
        self._inner = inner
        self._guard = guard
        self._log = LastMessage()
        logging.getLogger("opentelemetry").addHandler(self._log)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; called in the exporter's own thread."""
        result = self._guard.run(self._inner.export, spans)
        if result is SpanExportResult.FAILURE:
            self._guard.fail(ConnectionError(self._log.message))
        return result or SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._guard.run(self._inner.shutdown)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._guard.run(self._inner.force_flush, timeout_millis))


class LastMessage(logging.Handler):
    """Keeps the last log message of a library, to report why a call of it failed."""

    message = "no answer"

    def emit(self, record: logging.LogRecord) -> None:
        self.message = record.getMessage()


class Spans:
    """Observer that makes a span for each finished request."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._tracer = provider.get_tracer(SERVICE)
        self._model = model

    def __call__(self, finished: FinishedRequest) -> None:
        metrics, operation = finished.metrics, OPERATION.get("text_completion")
        since_epoch = time.time() - time.monotonic()
        end = metrics.finished_time or time.monotonic()
        attributes = dict(_attributes(finished, self._model, operation))
        span = self._tracer.start_span(
            f"{operation} {finished.adapter or self._model}",
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_nanoseconds(metrics.arrival_time + since_epoch),
        )
        for name, at in metrics.events:
            span.add_event(name, timestamp=_nanoseconds(at + since_epoch))
        if finished.finish_reason in ("error", "deadline"):
            span.set_status(StatusCode.ERROR, finished.finish_reason)
        span.end(_nanoseconds(end + since_epoch))


def _attributes(
    finished: FinishedRequest, model: str, operation: str
) -> Iterator[tuple[str, AttributeValue]]:
    """Yield a span's attributes, named by OpenTelemetry's conventions and again as in vLLM."""
    params, model = finished.params, finished.adapter or model
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", SERVICE
    yield "gen_ai.request.model", model
    if finished.pooling is None:
        yield from _sampling(params)
    yield "gen_ai.response.id", finished.request_id.partition(OURS)[0]
    yield "gen_ai.response.model", model
    yield "gen_ai.response.finish_reasons", [finished.finish_reason]
    yield "gen_ai.usage.input_tokens", finished.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", finished.num_output_tokens
    yield "gen_ai.usage.cache_read.input_tokens", finished.num_cached_tokens
    yield "gen_ai.request.id", finished.request_id
    yield "gen_ai.usage.num_sequences", params.n
    yield "gen_ai.usage.prompt_tokens", finished.num_prompt_tokens
    yield "gen_ai.usage.completion_tokens", finished.num_output_tokens
    yield from _times(finished)
    for name, num in finished.metrics.counters.items():
        yield f"metronome.{name}", num
    yield "metronome.num_preemptions", finished.metrics.num_preemptions
    if finished.metrics.prefix_end:
        yield "metronome.prefix_end", finished.metrics.prefix_end
    if finished.metrics.prefix_evicted is not None:
        yield "metronome.prefix_evicted", finished.metrics.prefix_evicted


def _sampling(params: SamplingParams) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.top_k > 0:
        yield "gen_ai.request.top_k", float(params.top_k)
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.seed is not None:
        yield "gen_ai.request.seed", params.seed
    if params.n > 1:
        yield "gen_ai.request.choice.count", params.n
    yield "gen_ai.request.n", params.n
    yield "gen_ai.request.stream", params.output_kind == "delta"


def _times(finished: FinishedRequest) -> Iterator[tuple[str, float]]:
    metrics = finished.metrics
    arrival, scheduled = metrics.arrival_time, metrics.scheduled_time
    first, last = metrics.first_token_time, metrics.last_token_time
    if metrics.finished_time is not None:
        yield "gen_ai.latency.e2e", metrics.finished_time - arrival
    if scheduled is not None:
        yield "gen_ai.latency.time_in_queue", scheduled - arrival
    if first is not None:
        yield "gen_ai.response.time_to_first_chunk", first - arrival
        yield "gen_ai.latency.time_to_first_token", first - arrival
    if scheduled is not None and first is not None and last is not None:
        yield "gen_ai.latency.time_in_model_prefill", first - scheduled
        yield "gen_ai.latency.time_in_model_decode", last - first
        yield "gen_ai.latency.time_in_model_inference", last - scheduled
    for cause, seconds in metrics.waits.items():
        yield f"metronome.wait.{cause.replace(' ', '_')}", seconds


class WithParent:
    """ASGI middleware that makes the span in ``traceparent`` the parent of the request's spans."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        carrier = {
            each: headers[each].decode("latin-1") for each in TRACE_HEADERS if each in headers
        }
        token = attach(self._propagator.extract(carrier))
        OPERATION.set(operation)
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
