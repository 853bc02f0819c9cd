"""What metrics cost the server: nothing but appends while it serves, and one rendering a scrape.

    python benchmarks/server_metrics.py [--streams 64] [--seconds 10]

Nanoseconds a token that measuring adds where steps are processed (the front end alone, 256 rows a
step, medians of alternating rounds of CPU time), and that counting answers adds to a message;
microseconds that a finished request adds; and the CPU of the serving process a streamed token (the
model in the box in a process of its own, `--streams` raw HTTP readers), of which they are a share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import urllib.request

import psutil
from starlette.types import ASGIApp, Send
from support.served import Served, served

from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.core.client import CoreClient
from engine.frontend.session import Session
from engine.messages.params import SamplingParams
from engine.messages.requests import CoreOutputs, FinishedRequest, RequestMetrics, Started
from engine.server.metrics import RequestHistograms
from engine.server.traffic import Traffic

NUM_ROWS = 256
NUM_STEPS = 200
NUM_ROUNDS = 15


class Decided:
    max_model_len = 1 << 20
    vocab_size = 1 << 20
    eos_token_ids = ()


class NoCore(CoreClient):
    """Takes everything; its steps are made by the benchmark."""

    decided = Decided()  # type: ignore[assignment]
    id_prefix = ""

    def add_all(self, requests: object) -> dict[int, Exception]:
        return {}


def step_seconds(is_measured: bool) -> float:
    """CPU time of processing a step."""
    config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
    session = Session(config, NoCore(), None, time.monotonic)  # type: ignore[abstract]
    if is_measured:
        session.outputs.measure()
    params = SamplingParams(max_tokens=10_000, output_kind="delta", ignore_eos=True)
    ids = []
    for number in range(NUM_ROWS):
        submission = session.inputs.process(str(number), [5, 6], params, {})
        session.submit(submission)
        ids.append(submission.requests[0].request_id)
    first = CoreOutputs(ids, [7] * NUM_ROWS, None, 1.0)
    first.started = [Started(row, 0, 0.5) for row in range(NUM_ROWS)]
    session.outputs.process(first)
    batches = [CoreOutputs(ids, [7] * NUM_ROWS, None, 2.0 + 0.01 * n) for n in range(NUM_STEPS)]
    began = time.process_time()
    for batch in batches:
        session.outputs.process(batch)
    return (time.process_time() - began) / NUM_STEPS


def finish_seconds() -> float:
    histograms = RequestHistograms()
    metrics = RequestMetrics(0.0, 0.1, 0.2, 1.2, 1.2)
    finished = FinishedRequest("id", SamplingParams(), "length", 100, 0, 100, metrics)
    began = time.process_time()
    for _ in range(20_000):
        histograms.observe(finished)
    return (time.process_time() - began) / 20_000


def message_seconds() -> float:
    """What counting traffic adds to a message of an answer."""

    async def send(message: object) -> None: ...

    async def application(scope: object, receive: object, send: Send) -> None:
        for _ in range(100_000):
            await send({"type": "http.response.body", "body": b"", "more_body": True})

    def seconds(app: ASGIApp) -> float:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        began = time.process_time()
        asyncio.run(app(scope, None, send))
        return (time.process_time() - began) / 100_000

    counted = Traffic().counting(application, [])
    return statistics.median(seconds(counted) - seconds(application) for _ in range(NUM_ROUNDS))


async def read(server: Served, body: bytes, until: float) -> int:
    """Events of one stream after the other."""
    num_events = 0
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        while part := await reader.read(1 << 16):
            num_events += part.count(b"data: {")
        writer.close()
    return num_events


def serving_seconds(num_streams: int, seconds: float) -> tuple[float, float, float]:
    """CPU time of the serving process a token, tokens a second, and CPU time of a scrape."""
    options = ("--multiprocess", "--num-threads", "1", "--max-model-len", "512")
    with served("--served-model-name", "box", *options) as server:
        body = json.dumps(
            {
                "model": "box",
                "prompt": "x",
                "max_tokens": 200,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        process = psutil.Process(server.process.pid)

        def cpu() -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        def generated() -> float:
            text = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
            (line,) = [x for x in text.splitlines() if x.startswith("vllm:generation_tokens_total")]
            return float(line.split()[-1])

        async def load(length: float) -> None:
            until = time.monotonic() + length
            await asyncio.gather(*(read(server, body, until) for _ in range(num_streams)))

        asyncio.run(load(1.0))
        before, tokens_before, began = cpu(), generated(), time.monotonic()
        asyncio.run(load(seconds))
        used, took = cpu() - before, time.monotonic() - began
        tokens = generated() - tokens_before
        before = cpu()
        for _ in range(50):
            generated()
        return used / tokens, tokens / took, (cpu() - before) / 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    rounds = [(step_seconds(False), step_seconds(True)) for _ in range(NUM_ROUNDS)]
    plain = statistics.median(before for before, _ in rounds) / NUM_ROWS
    added = statistics.median(after - before for before, after in rounds) / NUM_ROWS
    print(f"a row of a step: {1e9 * plain:.0f} ns; measuring adds {1e9 * added:.0f} ns")
    print(f"a finished request adds {1e6 * finish_seconds():.1f} us")
    message = message_seconds()
    print(f"counting traffic adds {1e9 * message:.0f} ns to a message")
    a_token, rate, scrape = serving_seconds(asked.streams, asked.seconds)
    print(f"serving process: {1e6 * a_token:.1f} us a streamed token ({rate:.0f} tokens/s)")
    print(f"a scrape: {1e3 * scrape:.1f} ms of CPU")
    print(f"both are {100 * (added + message) / a_token:.2f} % of the serving process's CPU")


if __name__ == "__main__":
    main()
