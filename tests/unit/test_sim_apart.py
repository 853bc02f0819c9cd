"""Prefill apart in simulations: nothing is lost, and transfers queue on the link."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError
from policylab.sim.apart import ApartRun
from policylab.sim.engine import Engine
from policylab.sim.figures import recomputed
from policylab.sim.run import Run, capacity_of, run
from policylab.sim.tiers import LinkedShelf, Tier, read_link
from policylab.sim.worker import StepCost
from policylab.sim.workloads import find_workload

NUM = 24
WORKLOADS = (
    f"log-uniform(prompt_tokens=(16, 2000), output_tokens=(4, 64), num_requests={NUM})",
    f"agents(num_requests={NUM})",
    f"closed-loop(clients=6, think=0.1, num_requests={NUM}, lengths='fixed(prompt=700,output=20)')",
)
ENGINE = Engine(max_num_seqs=16, num_blocks=600)
APART = replace(ENGINE, prefill_cores=1, decode_cores=1)
LONG = "log-uniform(prompt_tokens=(900, 1000), output_tokens=(4, 8), num_requests=12)"


class WatchedLink(LinkedShelf):
    """Notes when each transfer uses the link: begin and end in seconds, and blocks."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.uses: list[tuple[float, float, int]] = []

    def load(self, num_blocks: int, now: float) -> tuple[float, float]:
        ends_at, seconds = super().load(num_blocks, now)
        done = ends_at - self.tier.latency
        self.uses.append((done - num_blocks * self.tier.load, done, num_blocks))
        assert ends_at - now >= seconds - 1e-9
        return ends_at, seconds


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[WatchedLink]:
    """The links of the runs."""
    made: list[WatchedLink] = []

    def make(tier: Tier) -> WatchedLink:
        made.append(WatchedLink(tier))
        return made[-1]

    monkeypatch.setattr("policylab.sim.apart.LinkedShelf", make)
    return made


def num_tokens(made: Run) -> int:
    """Output tokens that were sent."""
    return int(made.gaps[:, 2].sum()) + int((~np.isnan(made.requests.times("first"))).sum())


def counters(made: Run) -> Any:
    return Counter(made.totals["counters"])


@pytest.mark.parametrize("case", range(6))
def test_each_request_ends_once_with_its_tokens(case: int, links: list[WatchedLink]) -> None:
    seed = case + 20261127
    dice = Random(seed)
    print("seed", seed)
    workload = dice.choice(WORKLOADS)
    link = Tier(
        name="tcp",
        blocks=dice.choice((20, 20_000)),
        load=dice.choice((1e-6, 1e-4, 3e-3)),
        latency=dice.choice((0.0, 1e-3, 0.5)),
        store=dice.choice((0.0, 1e-4)),
    )
    engine = replace(
        ENGINE,
        prefill_cores=dice.randint(1, 2),
        decode_cores=dice.randint(1, 3),
        prefill_threshold=dice.choice((1, 64, 256)),
        depth=dice.randint(1, 2),
        num_blocks=dice.choice((150, 600)),
        kv_link=link,
        kv_tiers=dice.choice(((), (Tier(blocks=500),))),
    )
    rate = None if "closed" in workload else dice.choice((2.0, 20.0))
    policy = dice.choice(("fcfs", "fastserve", "lpm"))
    made = run(policy, workload, engine, seed=seed, rate=rate)
    requests = made.requests
    assert len(requests) == NUM and len(set(requests.names["request_id"])) == NUM
    assert set(requests.names["outcome"]) <= {"done", "refused"}
    assert num_tokens(made) == requests.counts("num_output")[requests.done].sum()
    found = counters(made)
    apart = {name: found[f"prefill apart.{name}"] for name in ("sent", "done", "failed", "aborted")}
    assert apart["sent"] == apart["done"] + apart["failed"] + apart["aborted"], apart
    (used,) = links
    assert found["kv link.blocks"] == sum(blocks for *_, blocks in used.uses)
    ends = 0.0
    for begins, done, _ in used.uses:
        assert begins >= ends - 1e-9, "two transfers use the link at once"
        ends = done
    again = run(policy, workload, engine, seed=seed, rate=rate)
    assert again.totals == made.totals


def test_transfers_wait_for_each_other_on_the_link(links: list[WatchedLink]) -> None:
    engine = replace(ENGINE, prefill_cores=4, decode_cores=2, kv_link=Tier(load=2e-3, latency=0.05))
    cost = StepCost(per_token=1e-3)  # so that a link that moves a block in 2 ms pays
    made = run("fcfs", LONG, replace(engine, cost=cost), rate=1e6)
    (link,) = links
    assert len(link.uses) == 12 and counters(made)["kv link.blocks"] == sum(u[2] for u in link.uses)
    begins, ends = ([use[place] for use in link.uses] for place in (0, 1))
    waited = sum(begin == end for begin, end in zip(begins[1:], ends[:-1], strict=True))
    assert waited >= 6, "most begin when the transfer before has left the link"
    first = made.requests.times("first")
    for number, (_, done, _) in enumerate(link.uses, 1):
        assert (first <= done + 0.05).sum() < number, "a request started before its blocks came"


def test_a_load_over_a_link_that_got_slow_is_given_up_and_computed() -> None:
    engine = replace(APART, kv_link=Tier(load=0.5), cost=StepCost(per_token=0.05))
    made = run("fcfs", LONG, engine, rate=1e6)
    found = counters(made)
    assert made.requests.done.all() and found["kv load.too_slow"] > 0
    assert recomputed(made) > 0.2


def test_a_link_slower_than_computing_is_left_alone() -> None:
    workload = "log-uniform(prompt_tokens=(16, 1000), output_tokens=(4, 8), num_requests=24)"
    made = run("fcfs", workload, replace(APART, kv_link=Tier(load=10.0)), seed=1, rate=5.0)
    assert made.requests.done.all() and counters(made)["prefill apart.sent"] > 5
    assert counters(made)["kv link.blocks"] == 0


def test_long_prompts_apart_delay_no_output_of_others() -> None:
    workload = "log-uniform(prompt_tokens=(16, 2000), output_tokens=(8, 64), num_requests=80)"
    engine = replace(ENGINE, num_blocks=2000)
    mixed = run("fcfs", workload, replace(engine, data_parallel_size=2), rate=10.0)
    apart = run("fcfs", workload, replace(engine, prefill_cores=1, decode_cores=1), rate=10.0)
    gaps = [
        np.quantile(np.repeat(each.gaps[:, 1], each.gaps[:, 2].astype(int)), 0.99)
        for each in (mixed, apart)
    ]
    assert gaps[1] < 0.6 * gaps[0]
    assert recomputed(apart) < 0.05 and num_tokens(apart) == num_tokens(mixed)
    assert recomputed(mixed) == 0.0


def test_one_decode_core_plans_what_a_lone_engine_plans() -> None:
    workload = find_workload("log-uniform(num_requests=60)")
    never = replace(ENGINE, prefill_cores=1, decode_cores=1, prefill_threshold=10_000)
    made, lone = (
        ApartRun("fcfs", workload, never, seed=2, rate=5.0),
        run("fcfs", workload, ENGINE, seed=2, rate=5.0),
    )
    made.finish()
    assert made.clock.cores[1].worker.decisions == lone.totals["decisions"]
    assert (made.seen.requests.times("last") == lone.requests.times("last")).all()


def test_a_load_of_several_cores_is_a_share_of_what_they_can_serve() -> None:
    workload = find_workload("log-uniform(num_requests=100)")
    apart, lone = (capacity_of(workload, each, num_requests=50) for each in (APART, ENGINE))
    assert apart == 2 * lone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_cores": 1}, "prefill_cores is 1 and decode_cores is 0: set both"),
        ({"decode_cores": 2}, "prefill_cores is 0 and decode_cores is 2: set both"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"prefill_cores": 1, "decode_cores": 1, "prefill_threshold": 0}, "prefill_threshold is 0"),
        (
            {"prefill_cores": 1, "decode_cores": 1, "enable_prefix_caching": False},
            "enable_prefix_caching is False",
        ),
    ],
)
def test_cores_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(ENGINE, **options)


def test_links_are_read_from_a_text() -> None:
    assert read_link("tcp(load=1e-3)") == Tier(name="tcp", load=1e-3)
    with pytest.raises(ConfigError, match="has no option 'speed'; its options are"):
        read_link("tcp(speed=3)")
    with pytest.raises(ConfigError, match="steps are kept of one core, but the engine has 2"):
        run("fcfs", LONG, APART, steps=True)
