"""A proxy for an engine that computes prompts and one that continues them, as vLLM's users have:
it passes on what the first one's answer says about the KV, and knows nothing else."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.remote_prefill import TO_PRODUCER
from support.served import Served


class Proxy(ThreadingHTTPServer):
    """``passed``: the parameters that it has passed on."""

    daemon_threads = True

    def __init__(self, producer: Served, consumer: Served) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.producer = producer
        self.consumer = consumer
        self.passed: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        whole = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = str(uuid.uuid4())
        first = {**whole, "kv_transfer_params": TO_PRODUCER, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        answer = self.server.producer.ask(self.path, first, X_Request_Id=name)
        if answer.status == 200:
            params = answer.json.get("kv_transfer_params")
            self.server.passed.append(params)
            body = {**whole, "kv_transfer_params": params} if params else whole
            answer = self.server.consumer.ask(self.path, body, X_Request_Id=name)
        self.send_response(answer.status)
        self.send_header("Content-Type", str(answer.headers["Content-Type"]))
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def proxy(producer: Served, consumer: Served) -> Iterator[Proxy]:
    """A proxy in a thread."""
    with Proxy(producer, consumer) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
