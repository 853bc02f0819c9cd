"""The server as a deployment of Ray Serve, used by OpenAI's client."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest
from support.patience import WAIT_SECONDS
from support.ray_cluster import ray_cluster
from support.served import free_port

from engine.errors import ConfigError

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install metronome-engine[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Two replicas on two nodes."""
    with ray_cluster({"num_cpus": 1}, {"num_cpus": 1}) as (cluster, _):
        import ray
        from ray import serve

        from engine import cluster as ours

        ray.init(address=cluster.address, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"port": port}, proxy_location="HeadOnly")
        app = ours.deployment(
            min_replicas=2,
            max_replicas=2,
            num_kv_blocks=200,
            serve_options={"health_check_period_s": 1.0},
        )
        serve.run(app)
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(api_key="none", base_url=url, max_retries=0) as made:
            yield made
        serve.shutdown()


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def replicas() -> list[int]:
    """Process ids of the replicas."""
    return [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if "ServeReplica:default:metronome" in " ".join(each.info["cmdline"] or ())
    ]


def test_a_client_streams_while_a_replica_is_killed_and_replaced(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    options: dict[str, Any] = {
        "model": model.id, "prompt": PROMPT, "max_tokens": 64, "temperature": 0.0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.completions.create(**options).choices[0].text
    parts = [c.choices[0].text for c in client.completions.create(**options, stream=True)]
    assert (
        "".join(parts) == whole and len(parts) > 1
    )  # a stream comes in parts, more of them if the machine is idle

    streams = [client.completions.create(**options, stream=True) for _ in range(8)]
    for stream in streams:
        next(stream)
    killed, _ = replicas()
    os.kill(killed, signal.SIGKILL)
    ends = []
    for stream in streams:
        try:
            ends.append(text_of(stream))
        except Exception:
            ends.append(None)
    good = [end for end in ends if end is not None and whole.endswith(end)]
    assert good  # of the other replica, to their end
    began = time.monotonic()
    for _ in range(8):  # the other replica goes on
        assert client.completions.create(**options).choices[0].text == whole
    while len(new := replicas()) < 2 or killed in new:
        assert time.monotonic() - began < WAIT_SECONDS
        time.sleep(0.1)


def test_options_that_cannot_work_are_refused_before_anything_is_deployed() -> None:
    from engine.cluster import deployment

    with pytest.raises(ConfigError, match="min_replicas is 3 and max_replicas 2"):
        deployment(min_replicas=3, max_replicas=2)
    with pytest.raises(ConfigError, match="unknown option 'max_num_seq'"):
        deployment(max_num_seq=3)
    with pytest.raises(ConfigError, match="target_requests is 0"):
        deployment(target_requests=0)


@pytest.mark.parametrize(
    "running, waiting, num_replicas, wanted",
    [([8, 8], [5, 0], 2, 3), ([1, 0], [0, 0], 2, 1), ([], [], 0, 2)],
)
def test_replicas_follow_the_requests_that_engines_count(
    running: list[int], waiting: list[int], num_replicas: int, wanted: int
) -> None:
    from engine.cluster.serving import replicas_for_queue

    context: Any = SimpleNamespace(
        aggregated_metrics={
            "running": dict(enumerate(running)),
            "waiting": dict(enumerate(waiting)),
        },
        current_num_replicas=num_replicas,
        total_num_requests=9,  # at Serve's proxies
        config=SimpleNamespace(target_ongoing_requests=8.0),
    )
    assert replicas_for_queue(context)[0] == wanted
