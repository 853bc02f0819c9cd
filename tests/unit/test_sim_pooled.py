"""Simulations of pooled requests: queries overtake a burst of texts by priority."""

from __future__ import annotations

import numpy as np

from policylab.sim.run import Engine, Run, run

TIERS = "query(pooled=True,priority=0),text(pooled=True,priority=1,share=9)"
WORKLOAD = f"log-uniform(num_requests=400, tiers='{TIERS}', prompt_tokens=(16, 256))"
SMALL = Engine(scheduler={"max_num_batched_tokens": 512})


def simulated(policy: str, workload: str = WORKLOAD) -> Run:
    return run(policy, workload, SMALL, rate=500.0)  # above the capacity


def test_each_pooled_request_ends_with_one_result() -> None:
    found = simulated("fcfs").requests
    assert found.done.all()
    assert (found.counts("num_output") == 1).all()
    assert not np.isnan(found.times("first")).any()


def test_queries_overtake_a_burst_of_texts() -> None:
    def waits(policy: str) -> float:
        requests = simulated(policy).requests
        seconds = requests.times("first") - requests.times("arrival")
        return float(np.quantile(seconds[requests.counts("priority") == 0], 0.99))

    assert waits("priority") < 0.2 * waits("fcfs")


def test_a_vector_is_as_fast_as_a_token() -> None:
    tokens = WORKLOAD.replace("pooled=True,", "").replace(
        "prompt_tokens", "output_tokens=(1, 1), prompt_tokens"
    )
    pooled, sampled = simulated("fcfs"), simulated("fcfs", tokens)
    ends = [each.requests.times("last") for each in (pooled, sampled)]
    np.testing.assert_allclose(*ends)
