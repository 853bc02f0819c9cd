"""A server of embeddings as operators run it: a core in its own process, keys, adapters,
priorities, limits, and its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.box_adapters import write_adapter
from support.served import Served, forked

pytest.importorskip("starlette")

KEY = "key-one"
TEXTS = ["def add(a, b):", "The colour of the sky", "x = [1, 2]"]
BURST = [[10 + number] * 120 for number in range(250)]
OPTIONS = (
    "--served-model-name", "box", "--runner", "pooling", "--num-threads", "1",
    "--dtype", "float32", "--max-model-len", "128", "--num-kv-blocks", "200",
    "--scheduling-policy", "priority", "--max-num-batched-tokens", "256", "--enable-lora",
    "--pooler-config", '{"is_matryoshka": true, "use_activation": true}',
    "--multiprocess", "--api-key", KEY, "--request-log", "json",
)  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Served]:
    adapter = write_adapter(log.parent / "sql", 1)
    with forked(*OPTIONS, "--lora-modules", f"sql={adapter}", log=log) as made:
        yield made


def post(server: Served, path: str = "/v1/embeddings", key: str = KEY, **fields: Any) -> Any:
    return server.ask(path, {"model": "box", **fields}, Authorization=f"Bearer {key}")


def vectors(server: Served, **fields: Any) -> np.ndarray:
    answer = post(server, **fields)
    assert answer.status == 200, answer.json
    return np.array([each["embedding"] for each in answer.json["data"]])


def test_adapters_are_models(server: Served) -> None:
    """Requests for the model and for an adapter are computed in the same steps."""
    with ThreadPoolExecutor(6) as threads:
        names = ["box", "sql"] * 3
        found = list(threads.map(lambda name: vectors(server, model=name, input=TEXTS), names))
    for place, each in enumerate(found):
        np.testing.assert_allclose(each, found[place % 2], atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.01
    answer = post(server, model="sql", path="/rerank", query="x", documents=TEXTS)
    assert answer.json["model"] == "sql"
    assert post(server, model="sqll", input="x").status == 404


def test_fewer_dimensions_of_a_matryoshka_model(server: Served) -> None:
    """The first numbers, normalised."""
    whole, cut = vectors(server, input=TEXTS), vectors(server, input=TEXTS, dimensions=48)
    first = whole[:, :48]
    want = first / np.linalg.norm(first, axis=1, keepdims=True)
    np.testing.assert_allclose(cut, want, atol=1e-5)
    answer = post(server, input=TEXTS, dimensions=500)
    assert answer.status == 400 and "must be at most 192" in answer.json["error"]["message"]


def test_a_key_is_needed(server: Served) -> None:
    for path in ("/v1/embeddings", "/rerank", "/score", "/classify", "/pooling"):
        assert post(server, path, key="other").status == 401


def test_a_query_goes_in_front_of_a_burst(server: Served) -> None:
    """A query with a lower number waits for one step, not for all texts of the burst."""
    vectors(server, input="warm")
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(vectors, server, input=BURST, priority=1)
        num_before = 0
        while not slow.done() and num_before < 5:
            vectors(server, input="a query", priority=0)
            num_before += not slow.done()
        assert num_before == 5, "queries are answered before the burst"
        assert len(slow.result()) == len(BURST)


def test_each_request_is_one_line_of_the_log(server: Served, log: Path) -> None:
    answer = post(server, input=TEXTS, model="sql")
    name = answer.json["id"].removeprefix("embd-")
    end = time.monotonic() + 10
    lines: list[dict[str, Any]] = []
    while not lines and time.monotonic() < end:
        found = [line for line in log.read_text().splitlines() if line.startswith("{")]
        lines = [each for each in map(json.loads, found) if each["id"] == name]
    (line,) = lines
    assert (line["path"], line["status"], line["adapter"]) == ("/v1/embeddings", 200, "sql")
    assert line["prompt_tokens"] == answer.json["usage"]["prompt_tokens"]
    assert (line["output_tokens"], line["finish_reason"]) == (0, "stop")


def test_a_request_that_takes_too_long_ends(server: Served) -> None:
    answer = post(server, input=BURST, timeout=0.05)
    assert (answer.status, answer.json["error"]["code"]) == (408, "deadline_exceeded")
    assert len(vectors(server, input=TEXTS)) == 3


def test_open_requests_are_finished_at_the_end(server: Served, log: Path) -> None:
    """The last test: it ends the server."""
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(vectors, server, input=BURST)
        while not server.ask("/load", Authorization=f"Bearer {KEY}").json["running"]:
            assert not slow.done()
        assert server.end() == 0
        assert len(slow.result()) == len(BURST)
    assert "1 requests were open" in log.read_text()
