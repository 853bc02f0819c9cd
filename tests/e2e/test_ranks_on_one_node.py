"""Ranks that all have room on the node of the core, of a Ray cluster, share its memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
from e2e.test_ngram import BOX
from support.live_core import wait_until
from support.processes import ranks_of
from support.ray_cluster import ray_cluster

from engine import LLM, SamplingParams

pytest.importorskip("ray", reason="Ray is not installed: pip install metronome-engine[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_ranks_on_one_node_are_processes_of_the_core() -> None:
    found = []
    with ray_cluster({"num_cpus": 1}, head_cpus=2):
        import ray

        placed = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
        options: list[dict[str, Any]] = [BOX, {**BOX, **placed, "num_threads": 2}]
        for each in options:
            with LLM(**each) as llm:
                found.append(llm.generate(["a list of"], GREEDY, use_tqdm=False)[0].outputs[0])
                if each is not BOX:
                    assert len(ranks_of(os.getpid())) == 1
                    assert ray.available_resources().get("CPU", 0) == 1
        assert wait_until(lambda: ray.available_resources().get("CPU", 0) == 3) is not None
    assert found[0].token_ids == found[1].token_ids
    assert not ranks_of(os.getpid())
