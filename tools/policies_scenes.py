"""Workloads and engines on which `docs/policies.md` measures the policies that ship.

A claim is a figure, where it is to be seen and in which direction it is to differ from that of
fcfs. Figures are those of `policylab.sim.figures`, and a few more of `policies_figures`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from engine.sched.predict.profile import AdapterCost
from policylab.sim.run import Engine

SHOWN = (
    *("ttft.mean", "ttft.p99", "tpot.p99", "itl.p99", "e2e.mean", "normalised.mean"),
    *("tokens_per_second", "recomputed"),
)
"""Figures that every table has."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A workload, the engine that serves it, and how much of what it can serve comes."""

    workload: str
    engine: Engine
    load: float
    """Share of what fcfs can serve; infinite: all at once."""
    shows: str
    """What the scene shows."""
    figures: tuple[str, ...] = ()
    """Figures to show next to the others."""
    size: float = 1.0
    """Requests, as a multiple of those of the other scenes."""
    policies: tuple[str, ...] = ()
    """The policies to measure; empty: all."""


SCENES: dict[str, Scene] = {
    "log-uniform": Scene(
        workload="log-uniform",
        engine=Engine(max_num_seqs=32, num_blocks=800, length_predictor="oracle"),
        load=0.8,
        shows="all sizes, few seats and KV blocks, lengths known beforehand",
        figures=("ttft.p50", "slowdown.mean", "preempted", "readers"),
        size=1.5,
    ),
    "azure-conv": Scene(
        workload="azure-conv",
        engine=Engine(
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            num_blocks=24_000,
            length_predictor="history",
        ),
        load=0.55,
        shows="enough seats and blocks: only the tokens of a step run short when many come at once",
        figures=("ttft.p50",),
        size=2.0,
    ),
    "tiers": Scene(
        workload="tiers(arrivals='burst(every=10,seconds=2.5,times_as_many=3)')",
        engine=Engine(max_num_seqs=32, max_num_batched_tokens=1024, num_blocks=900),
        load=0.95,
        shows="bursts of more than can be served: chats with promises, deadlines and the higher "
        "priority, next to long batch work",
        figures=("attainment", "goodput", "ttft of chat", "ttft of batch", "readers", "refused"),
    ),
    "two-users": Scene(
        workload="two-users(arrivals='gamma(cv=2)')",
        engine=Engine(max_num_seqs=32, num_blocks=900),
        load=0.95,
        shows="a user with nine times the requests of the other",
        figures=("gap", "jain", "ttft of calm", "ttft of flood"),
    ),
    "agents": Scene(
        workload="agents(num_users=4,num_systems=16)",
        engine=Engine(max_num_seqs=32, num_blocks=1000),
        load=0.9,
        shows="programs of four users, whose prompts begin with all earlier turns, and a cache too "
        "small for all of them",
        figures=("prefix_hits", "programs", "gap"),
    ),
    "bursts": Scene(
        workload="agents(arrivals='burst(every=120,seconds=20,times_as_many=1000)',turns=10.0,"
        "max_context=16384,num_systems=0,"
        "lengths='log-uniform(prompt=(128, 1024), output=(16, 64))')",
        engine=Engine(max_num_seqs=64, max_num_batched_tokens=1024, num_blocks=6250),
        load=0.9,
        shows="programs that start in bursts, in which the KV of all is more than the cache holds",
        figures=("program.mean", "prefix_hits"),
        size=6.0,
        policies=("fcfs", "plas", "continuum"),
    ),
    "offline": Scene(
        workload="log-uniform(prompt_tokens=(16, 4096), output_tokens=(16, 1024))",
        engine=Engine(
            max_num_seqs=64,
            num_blocks=1000,
            enable_prefix_caching=False,
            length_predictor="history",
        ),
        load=inf,
        shows="all at once, very few KV blocks, no prefix cache, lengths guessed from ended "
        "requests",
        figures=("makespan", "preempted"),
        size=0.8,
    ),
    "adapters": Scene(
        workload="log-uniform(prompt_tokens=(16, 256), output_tokens=(8, 128), num_adapters=256)",
        engine=Engine(max_num_seqs=8, max_loras=8, adapter_cost=AdapterCost(copy=0.01, read=0.05)),
        load=0.95,
        shows="as many slots for LoRA adapters as seats, and many more adapters (Zipf)",
        figures=("adapter_loads", "adapter_reads", "ttft.p50"),
        policies=("fcfs", "adapter-clustering"),
    ),
}
