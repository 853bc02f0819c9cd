"""What operators see of `metronome serve`: metrics, health, keys, spans; and that it obeys them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import SOON_SECONDS, WAIT_SECONDS
from support.served import Answer, Served, forked

openai = pytest.importorskip("openai")
parser = pytest.importorskip("prometheus_client.parser")
collected = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

MODEL = "box"
OPTIONS = (
    "--served-model-name", MODEL, "--num-threads", "1", "--max-model-len", "256",
    "--num-kv-blocks", "400", "--dtype", "float32",
)  # fmt: skip
KEY, ADMIN = "key-one", "the-admin"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def eventually(holds: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it has not come to be"
        time.sleep(0.05)


class Collector(ThreadingHTTPServer):
    """Takes spans as OpenTelemetry's collectors do."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        super().__init__(("127.0.0.1", 0), TakeSpans)
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"


class TakeSpans(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for each in collected.ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append(each.resource)
            for scope in each.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# ours\n\nkey-in-file\n")
    return path


@pytest.fixture(scope="module")
def server(collector: Collector, key_file: Path) -> Iterator[Served]:
    options = ("--api-key", KEY, "--api-key-file", str(key_file))
    more = ("--otlp-traces-endpoint", collector.endpoint)
    variables = {"METRONOME_ADMIN_API_KEY": ADMIN, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with forked(*OPTIONS, *options, *more, **variables) as made:
        yield made


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(server: Served, key: str = KEY) -> Samples:
    """Each sample by name and labels, less the model's name, which all of ours have."""
    answer = server.ask("/metrics", **bearer(key))
    assert answer.status == 200 and answer.headers.get_content_type() == "text/plain"
    samples: Samples = {}
    for family in parser.text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not sample.name.startswith("process_"):
                assert labels.pop("model_name") == MODEL
            place = (sample.name, tuple(sorted(labels.items())))
            assert place not in samples
            samples[place] = sample.value
    return samples


def moved(before: Samples, after: Samples) -> dict[str, float]:
    """What was counted since then, by name, buckets aside, and by the label if there is one."""
    found = {}
    for (name, labels), value in after.items():
        if not name.endswith("_bucket"):
            label = "".join(f" {value}" for _, value in labels)
            found[name + label] = value - before.get((name, labels), 0.0)
    return found


def test_metrics_are_what_clients_saw(server: Served, client: Any) -> None:
    before = scrape(server)
    plain = {"model": MODEL, "prompt": "def add(a, b):\n    " * 6, "temperature": 0}
    fixed = {**plain, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**fixed)
    began = time.monotonic()
    chunks = list(client.completions.create(**fixed, stream=True))
    seconds = time.monotonic() - began
    assert sum(bool(chunk.choices[0].text) for chunk in chunks) > 5
    several = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4, n=3,
        temperature=1, extra_body={"ignore_eos": True},
    )  # fmt: skip
    stopped = client.completions.create(**plain, max_tokens=100, stop=[whole.choices[0].text[2:4]])
    assert stopped.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{**fixed, "temperature": -1})
    assert server.ask("/v1/models/box", **bearer(KEY)).status == 200
    assert server.ask("/v1/models", **bearer("wrong")).status == 401
    assert server.ask("/an/other", **bearer(KEY)).status == 404
    now = moved(before, scrape(server))

    answers = {name: num for name, num in now.items() if "http_responses" in name and num}
    assert answers == {
        f"metronome_http_responses_total {name}": num
        for name, num in {
            "/v1/completions 200": 3, "/v1/chat/completions 200": 1, "/v1/completions 400": 1,
            "/v1/models/{name:path} 200": 1, "/v1/models 401": 1, "other 404": 1, "/metrics 200": 1,
        }.items()
    }  # fmt: skip
    prompts = 3 * whole.usage.prompt_tokens + several.usage.prompt_tokens
    assert now["vllm:prompt_tokens_total"] == prompts
    tokens = 20 + 20 + 12
    written = tokens + stopped.usage.completion_tokens
    assert 0 <= now["vllm:generation_tokens_total"] - written <= 2  # of the stop string
    assert now["vllm:request_success_total length"] == 3
    assert now["vllm:request_success_total stop"] == 1
    assert now["vllm:request_success_total abort"] == now["vllm:request_success_total error"] == 0
    assert now["vllm:request_prompt_tokens_sum"] == prompts
    assert now["vllm:request_generation_tokens_sum"] == written
    assert now["vllm:request_params_n_sum"] == 6
    assert now["vllm:request_params_max_tokens_sum"] == 20 + 20 + 4 + 100
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
        assert now[f"vllm:{name}_seconds_count"] == 4
    assert now["vllm:e2e_request_latency_seconds_sum"] > seconds / 2
    assert 19 + 19 + 3 < now["vllm:inter_token_latency_seconds_count"] <= 19 + 19 + 3 + 100
    in_steps = now["vllm:iteration_tokens_total_sum"] - prompts
    assert 0 <= in_steps - now["vllm:generation_tokens_total"] <= 2  # behind the stop string
    assert now["vllm:prefix_cache_queries_total"] >= prompts
    assert 0 < now["vllm:prefix_cache_hits_total"] < now["vllm:prefix_cache_queries_total"]
    assert any(name.startswith("metronome_wait_seconds_total") for name in now)
    parts = ("queue", "prefill", "decode")
    whole_seconds = sum(now[f"vllm:request_{part}_time_seconds_sum"] for part in parts)
    assert whole_seconds == pytest.approx(now["vllm:e2e_request_latency_seconds_sum"], abs=0.05)


ALIASES = {
    "metronome_requests_running": "vllm:num_requests_running",
    "metronome_requests_waiting": "vllm:num_requests_waiting",
    "metronome_requests_waiting_by_reason": "vllm:num_requests_waiting_by_reason",
    "metronome_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "metronome_prefix_cache_query_tokens_total": "vllm:prefix_cache_queries_total",
    "metronome_prefix_cache_hit_tokens_total": "vllm:prefix_cache_hits_total",
    "metronome_preemptions_total": "vllm:num_preemptions_total",
    "metronome_prompt_tokens_total": "vllm:prompt_tokens_total",
    "metronome_generation_tokens_total": "vllm:generation_tokens_total",
    "metronome_requests_finished_total": "vllm:request_success_total",
    "metronome_requests_refused_total": "vllm:admission_rejections_total",
    "metronome_step_tokens_bucket": "vllm:iteration_tokens_total_bucket",
    "metronome_first_token_seconds_bucket": "vllm:time_to_first_token_seconds_bucket",
    "metronome_between_tokens_seconds_bucket": "vllm:inter_token_latency_seconds_bucket",
    "metronome_request_seconds_per_token_bucket": (
        "vllm:request_time_per_output_token_seconds_bucket"
    ),
    "metronome_request_seconds_bucket": "vllm:e2e_request_latency_seconds_bucket",
    "metronome_request_queue_seconds_bucket": "vllm:request_queue_time_seconds_bucket",
    "metronome_request_prefill_seconds_bucket": "vllm:request_prefill_time_seconds_bucket",
    "metronome_request_decode_seconds_bucket": "vllm:request_decode_time_seconds_bucket",
    "metronome_request_inference_seconds_bucket": "vllm:request_inference_time_seconds_bucket",
    "metronome_request_prompt_tokens_bucket": "vllm:request_prompt_tokens_bucket",
    "metronome_request_generation_tokens_bucket": "vllm:request_generation_tokens_bucket",
    "metronome_request_n_bucket": "vllm:request_params_n_bucket",
    "metronome_request_max_tokens_bucket": "vllm:request_params_max_tokens_bucket",
}


def test_each_value_has_both_names(server: Served) -> None:
    samples = scrape(server, ADMIN)
    values: dict[str, dict[Any, float]] = {}
    for (name, labels), value in samples.items():
        values.setdefault(name, {})[labels] = value
    for ours, theirs in ALIASES.items():
        assert values[ours] == values[theirs], ours
    assert ("metronome_engine_up", ()) in samples
    info = next(labels for name, labels in samples if name == "vllm:cache_config_info")
    assert dict(info) == {"block_size": "16", "num_gpu_blocks": "400"}
    assert values["metronome_scheduling_policy_info"] == {(("policy", "fcfs"),): 1.0}
    for name, buckets in values.items():
        if name.endswith("_bucket"):
            ordered = sorted((float(dict(labels)["le"]), num) for labels, num in buckets.items())
            assert [num for _, num in ordered] == sorted(num for _, num in ordered), name
            assert ordered[-1] == (float("inf"), values[name.replace("_bucket", "_count")][()])


def test_who_leaves_is_an_abort_and_open_requests_are_load(server: Served) -> None:
    before = scrape(server)
    asked = {
        "model": MODEL, "prompt": "x", "max_tokens": 250, "stream": True,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            streams = [await client.completions.create(**asked) for _ in range(3)]
            load = (await asyncio.to_thread(server.ask, "/load", **bearer(KEY))).json
            assert load["server_load"] == 3 and load["running"] <= 3
            assert load["waiting"] == 0 and 0 <= load["kv_usage"] <= 1
            for stream in streams:
                await stream.close()

    asyncio.run(leave())
    name = "vllm:request_success_total abort"
    eventually(lambda: moved(before, scrape(server))[name] == 3)
    assert server.ask("/load", **bearer(KEY)).json["server_load"] == 0


def test_operations_take_the_admin_key(server: Served, client: Any) -> None:
    admin = bearer(ADMIN)

    def post(path: str, **headers: str) -> Answer:
        return server.ask(path, {}, **headers)

    for wrong in (bearer(KEY), bearer("x"), {}):
        refused = post("/pause", **wrong)
        assert refused.status == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
    assert post("/pause", **admin, Origin="http://elsewhere.example").status == 403
    assert post("/pause", **admin, Origin="null").status == 403
    assert server.ask("/pause", **admin).status == 405
    assert "must be all or new" in post("/pause?what=some", **admin).json["error"]["message"]
    for path in ("/reset_encoder_cache", "/reset_mm_cache"):
        assert post(path, **bearer(KEY)).status == 401
        assert post(path, **admin).json == {"status": "reset"}
    assert post("/pause", **admin, Origin=server.url).status == 200
    try:
        assert server.ask("/is_paused", **admin).json == {"is_paused": True}
        unready = server.ask("/ready")
        assert unready.status == 503 and int(unready.headers["Retry-After"]) > 0
        assert server.ask("/health").status == 200  # it is well, and paused
        texts: list[str] = []
        asked = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        waiter = threading.Thread(
            target=lambda: texts.append(client.completions.create(**asked).choices[0].text)
        )
        waiter.start()
        eventually(lambda: server.ask("/load", **admin).json["waiting"] == 1)
        assert not texts
        waits = scrape(server)
        assert waits["vllm:num_requests_waiting_by_reason", (("reason", "capacity"),)] == 1
    finally:
        assert post("/resume", **admin).status == 200
    waiter.join()
    assert len(texts) == 1 and server.ask("/ready").status == 200
    assert server.ask("/is_paused", **admin).json == {"is_paused": False}
    assert post("/reset_prefix_cache", **admin).status == 200
    assert post("/reset_prefix_cache?reset_running_requests=1", **admin).status == 400
    profile = post("/start_profile", **admin)
    assert profile.status == 400 and "torch_profiler_dir" in profile.json["error"]["message"]


def test_keys_are_read_again(server: Served, key_file: Path) -> None:
    def lets_in(key: str) -> bool:
        statuses = {0, 1}
        while len(statuses) == 2:  # the file may be read between two requests
            statuses = {
                server.ask("/v1/models", **bearer(key)).status,
                server.ask("/v1/models", **{"x-api-key": key}).status,
            }
        assert statuses < {200, 401}
        return statuses == {200}

    assert lets_in(KEY) and lets_in("key-in-file") and lets_in(ADMIN) and not lets_in("another")
    assert server.ask("/v1/models", Authorization=KEY).status == 401
    assert server.ask("/metrics").status == 401
    for path in ("/health", "/ping", "/ready", "/version"):
        assert server.ask(path).status == 200
    assert server.ask("/ping", {}).status == 200
    new = key_file.with_name("new")
    new.write_text("another\n")
    new.replace(key_file)
    eventually(lambda: lets_in("another"), 10)
    assert lets_in(KEY) and not lets_in("key-in-file")


def test_spans_of_requests(server: Served, client: Any, collector: Collector) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=3,
        temperature=0.5, extra_headers={"traceparent": PARENT}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    list(client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2, stream=True))
    eventually(lambda: len(by_response(collector, answer.id)) == 1)
    (span,) = by_response(collector, answer.id)
    assert span.name == f"chat {MODEL}"
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert span.parent_span_id.hex() == PARENT.split("-")[2]
    about = attributes_of(span)
    assert about["gen_ai.operation.name"] == "chat" and about["gen_ai.response.model"] == MODEL
    assert about["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert about["gen_ai.usage.prompt_tokens"] == answer.usage.prompt_tokens
    assert about["gen_ai.usage.output_tokens"] == about["gen_ai.usage.completion_tokens"] == 5
    assert about["gen_ai.request.max_tokens"] == 5 and about["gen_ai.request.seed"] == 3
    assert about["gen_ai.request.temperature"] == 0.5
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(about["gen_ai.latency.e2e"], abs=1e-3)
    assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 30
    assert 0 < about["gen_ai.response.time_to_first_chunk"] <= seconds
    waits = {name: value for name, value in about.items() if name.startswith("metronome.wait.")}
    assert sum(waits.values()) == pytest.approx(about["gen_ai.latency.time_in_queue"], abs=0.01)
    assert [event.name for event in span.events][:2] == ["queued", "scheduled"]
    streamed = [each for each in collector.spans if each.name == f"text_completion {MODEL}"]
    eventually(lambda: {len(e.parent_span_id) for e in collector.spans} == {0, 8})
    assert all(each.parent_span_id == b"" for each in streamed)
    (name,) = {
        a.value.string_value for r in collector.resources for a in r.attributes
        if a.key == "service.name"
    }  # fmt: skip
    assert name == "metronome"


def by_response(collector: Collector, name: str) -> list[Any]:
    return [e for e in collector.spans if attributes_of(e).get("gen_ai.response.id") == name]


def attributes_of(span: Any) -> dict[str, Any]:
    return {each.key: plain(each.value) for each in span.attributes}


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [plain(each) for each in found.values] if kind == "array_value" else found


@pytest.fixture
def drafting() -> Iterator[Served]:
    """With a collector of spans that never answers."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        options = ("--otlp-traces-endpoint", endpoint, "--speculative-config", json.dumps(drafts))
        with forked(*OPTIONS, *options, OTEL_BSP_SCHEDULE_DELAY="50") as made:
            yield made


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def split(log: Path) -> Iterator[Served]:
    """With a core in a process of its own, which may die."""
    options = ("--multiprocess", "--health-timeout", "0.5", "--on-core-death", "stay")
    with forked(*OPTIONS, *options, log=log) as made:
        yield made


def test_drafts_are_counted_and_no_request_waits_for_spans(drafting: Served) -> None:
    body = {
        "model": MODEL, "prompt": "a b c a b c a b c a b c", "max_tokens": 40, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    before = scrape(drafting)
    took = []
    for _ in range(10):
        began = time.monotonic()
        assert drafting.ask("/v1/completions", body).status == 200
        took.append(time.monotonic() - began)
    assert max(took) < SOON_SECONDS
    now = moved(before, scrape(drafting))
    drafted = now["vllm:spec_decode_num_draft_tokens_total"]
    accepted = now["vllm:spec_decode_num_accepted_tokens_total"]
    assert 0 < now["vllm:spec_decode_num_drafts_total"] <= drafted >= accepted
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert accepted == sum(value for each, value in now.items() if each.startswith(name))
    assert drafted == now["metronome_feature_events_total drafts.num_draft_tokens"]
    assert now["vllm:generation_tokens_total"] == 400
    ends_unready(drafting)


def ends_unready(server: Served) -> None:
    """Told to end, it is not ready at once, and the stream that is open goes on to its end."""

    def is_unready() -> bool:
        try:
            return server.ask("/ready").status == 503
        except OSError:
            return True

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL, prompt="x", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(stream)
        server.process.terminate()
        eventually(is_unready)
        assert [first, *stream][-1].choices[0].finish_reason == "length"
    assert server.process.wait() == 0


def test_a_core_that_hangs_or_dies_is_seen(split: Served, log: Path) -> None:
    """The server's own process is well all the time, and ends when it is told to."""
    for path in ("/pause", "/resume", "/reset_prefix_cache", "/start_profile"):
        refused = split.ask(path, {}, **bearer("x"))
        assert refused.status == 403 and "--admin-api-key" in refused.json["error"]["message"]
    (core,) = (
        child for child in psutil.Process(split.process.pid).children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    )  # fmt: skip
    assert scrape(split)["metronome_engine_up", ()] == 1
    core.suspend()
    try:
        for path in ("/health", "/ready"):
            began = time.monotonic()
            answer = split.ask(path)
            assert time.monotonic() - began < SOON_SECONDS
            assert answer.status == 503 and int(answer.headers["Retry-After"]) > 0
            assert "not answered within 0.5 s" in answer.json["error"]["message"]
        samples = scrape(split)
        assert samples["metronome_engine_up", ()] == 0
        assert ("vllm:num_requests_running", ()) in samples  # as last known
        assert "running" in split.ask("/load").json
    finally:
        core.resume()
    eventually(lambda: split.ask("/health").status == 200)
    assert split.ask("/ready").status == 200
    core.send_signal(signal.SIGKILL)
    eventually(lambda: split.ask("/health").status == 503)
    refused = split.ask("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 3})
    for dead in (split.ask("/health"), refused):
        assert dead.status == 503 and int(dead.headers["Retry-After"]) > 0
        assert dead.json["error"]["code"] == "engine_dead"
    for line in ("was killed by SIGKILL", "no core is left: requests are answered with 503"):
        eventually(lambda line=line: line in log.read_text())  # a thread writes the log
    samples = scrape(split)
    assert samples["metronome_engine_up", ()] == samples["metronome_cores_alive", ()] == 0
    assert samples["metronome_cores", ()] == samples["metronome_core_deaths_total", ()] == 1
    assert split.end() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--health-timeout", "0"), "health_timeout is 0.0"),
        (("--otlp-traces-endpoint", "localhost:4318"), "otlp_traces_endpoint is 'localhost:4318'"),
        (("--api-key-file", os.devnull), "the file has no keys"),
        (("--api-key-file", "missing/file"), "No such file"),
        (("./no/model",), "model directory 'no/model' does not exist"),
        (("one", "--model", "another"), "MODEL is 'one' and --model is 'another'"),
    ],
)
def test_a_wrong_option_is_named(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine.cli.main import main

    assert main(["serve", *options]) != 0
    assert said in capsys.readouterr().err
