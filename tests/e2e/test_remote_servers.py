"""Two servers, one of which computes prompts for the other, and a proxy that knows vLLM's names."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.kv_stores import slow_profile
from support.patience import WAIT_SECONDS
from support.relays import relay
from support.remote_prefill import SECRET, TO_PRODUCER, peers
from support.remote_proxy import Proxy, proxy
from support.served import Served, forked, free_port

MODEL = "box"
COMMON = (
    *("--served-model-name", MODEL, "--num-threads", "1", "--max-model-len", "512"),
    *("--num-kv-blocks", "400", "--dtype", "float32", "--block-size", "8"),
)
TEXT = "def add(a, b):\n    return a + b\n\n\n"
COMPLETION = {"model": MODEL, "prompt": TEXT * 4, "max_tokens": 12, "temperature": 0}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": TEXT * 5}],
    "max_completion_tokens": 8,
    "temperature": 0,
}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


class Pair:
    """Two servers. ``port``: where the first serves its blocks."""

    def __init__(self, producer: Served, consumer: Served, port: int) -> None:
        self.producer = producer
        self.consumer = consumer
        self.port = port

    def prefill(self, path: str, body: dict[str, Any]) -> Any:
        """The parameters for the consumer."""
        first = {**body, "kv_transfer_params": TO_PRODUCER, "max_tokens": 1}
        first.pop("max_completion_tokens", None)
        answer = self.producer.ask(path, first)
        assert answer.status == 200, answer.body
        return answer.json["kv_transfer_params"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    port, profile = free_port(), slow_profile(tmp_path_factory.mktemp("profile") / "slow.json")
    common = (*COMMON, "--cost-profile", profile, "--kv-transfer-config")
    producer = json.dumps(peers("producer", port))
    consumer = json.dumps(peers("consumer", shares_memory=False))
    with (
        forked(*common, producer, METRONOME_CORE_SECRET=SECRET) as one,
        forked(*common, consumer, METRONOME_CORE_SECRET=SECRET) as two,
    ):
        yield Pair(one, two, port)


@pytest.fixture(scope="module")
def through(servers: Pair) -> Iterator[Proxy]:
    with proxy(servers.producer, servers.consumer) as made:
        yield made


def post(url: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        return bytes(answer.read())


def chunks_of(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def text_of(choice: Any) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def piece_of(choice: Any) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


@pytest.mark.parametrize("path", PATHS)
def test_a_proxy_gets_the_text_of_one_engine(path: str, servers: Pair, through: Proxy) -> None:
    whole = json.loads(post(through.url + path, PATHS[path]))
    passed = through.passed[-1]
    assert passed["do_remote_prefill"] is True and passed["do_remote_decode"] is False
    assert (passed["remote_host"], passed["remote_port"]) == ("127.0.0.1", servers.port)
    assert passed["remote_block_ids"] and passed["remote_engine_id"] and passed["tp_size"] == 1
    alone = servers.producer.ask(path, PATHS[path]).json
    assert text_of(whole["choices"][0]) == text_of(alone["choices"][0])
    usage = whole["usage"]
    num_prompt = usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 8 * 8 > 50
    assert "kv_transfer_params" not in whole and "kv_transfer_params" not in alone
    salted = {**PATHS[path], "cache_salt": "streamed"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(post(through.url + path, {**salted, **options}))
    streamed = [piece_of(chunk["choices"][0]) for chunk in chunks if chunk["choices"]]
    assert "".join(streamed) == text_of(alone["choices"][0])
    assert chunks[-1]["usage"] == usage


@pytest.mark.parametrize("path", PATHS)
def test_the_last_chunk_of_a_stream_says_where_the_blocks_are(path: str, servers: Pair) -> None:
    body = {**PATHS[path], "kv_transfer_params": TO_PRODUCER, "stream": True}
    chunks = chunks_of(post(servers.producer.url + path, body))
    found = [chunk for chunk in chunks if "kv_transfer_params" in chunk]
    assert len(found) == 1 and found[0]["choices"][0]["finish_reason"] == "length"
    assert found[0]["kv_transfer_params"]["remote_port"] == servers.port


def test_wrong_parameters_are_the_clients_fault(servers: Pair) -> None:
    for server, given, words in (
        (servers.consumer, {"do_remote_prefill": "1"}, "must be true or false"),
        (servers.consumer, {"do_remote_prefill": True}, "remote_host"),
        (
            servers.consumer,
            {"do_remote_prefill": True, "remote_host": "10.1.1.1", "remote_port": 1},
            "add it to 'allowed'",
        ),
        (servers.consumer, {"do_remote_decode": True}, "send the request to a producer"),
        (servers.producer, {"remote_block_ids": 3}, "must be a list"),
    ):
        answer = server.ask("/v1/completions", {**COMPLETION, "kv_transfer_params": given})
        assert answer.status == 400 and words in answer.json["error"]["message"], answer.body


def test_what_a_producer_that_dies_does_not_bring_is_computed(servers: Pair) -> None:
    """It dies amid one transfer and before another. The last test of these servers."""
    path, bodies = "/v1/completions", [{**COMPLETION, "cache_salt": name} for name in "ab"]
    given = [servers.prefill(path, body) for body in bodies]
    right = [servers.producer.ask(path, body).json["choices"] for body in bodies]
    answers: list[Any] = []
    with relay(servers.port, "stalled", 20_000) as address:
        there = {"remote_port": int(address.rpartition(":")[2])}
        body = {**bodies[0], "kv_transfer_params": given[0] | there}
        asking = threading.Thread(target=lambda: answers.append(servers.consumer.ask(path, body)))
        asking.start()
        time.sleep(0.2)  # in which some blocks come
        servers.producer.process.kill()
        asking.join()
    body = {**bodies[1], "kv_transfer_params": given[1]}
    answers.append(servers.consumer.ask(path, body))
    for answer, choices in zip(answers, right, strict=True):
        assert answer.status == 200 and answer.json["choices"] == choices
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] < 50
