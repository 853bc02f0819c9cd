"""KV tiers in simulations: preempted requests get their KV back, and nothing changes without."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from engine.errors import ConfigError
from policylab.sim.figures import recomputed
from policylab.sim.run import Engine, run
from policylab.sim.tiers import Tier, read_tiers

WORKLOAD = "log-uniform(prompt_tokens=(16, 1024), output_tokens=(16, 256), num_requests=80)"
ENGINE = Engine(max_num_seqs=32, num_blocks=260, length_predictor="history")
HOST = (Tier(blocks=20_000, load=1e-5),)


@pytest.mark.parametrize("policy", ["fastserve", "trail", "andes", "ltr"])
def test_preempted_requests_load_their_kv_instead_of_computing_it(policy: str) -> None:
    without = run(policy, WORKLOAD, ENGINE, rate=inf)
    found = run(policy, WORKLOAD, replace(ENGINE, kv_tiers=HOST), rate=inf)
    assert recomputed(without) > 0.3 and recomputed(found) < 0.02
    assert found.requests.done.all() and not found.not_own
    assert found.totals["counters"]["kv load.blocks_loaded"] > 100


def test_a_run_with_tiers_repeats_itself() -> None:
    engine = replace(ENGINE, kv_tiers=HOST)
    first, again = (run("fastserve", WORKLOAD, engine, rate=inf) for _ in range(2))
    assert first.totals["decisions"] == again.totals["decisions"]


def test_blocks_that_load_more_slowly_than_they_are_computed_stay_where_they_are() -> None:
    slow = replace(ENGINE, kv_tiers=(Tier(load=10.0),))
    found = run("fcfs", WORKLOAD, slow, rate=20.0)
    assert "kv load.loads" not in found.totals["counters"]


def test_tiers_are_read_from_a_text() -> None:
    host, disk = read_tiers("host(blocks=10, load=1e-5), disk(latency=0.01, store=0)")
    assert (host.name, host.blocks, host.load) == ("host", 10, 1e-5)
    assert (disk.name, disk.latency, disk.store) == ("disk", 0.01, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have a tier such as"),
        ("host(size=3)", "has no option 'size'; its options are"),
        ("host(blocks=0)", "blocks is 0, must be 1 or more"),
        ("host(load=-1)", "load is -1, must be 0 or more"),
        ("host(load=fast)", "load is 'fast'"),
        ("host(3)", "--kv-tiers has"),
    ],
)
def test_wrong_tiers_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read_tiers(text)
