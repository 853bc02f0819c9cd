"""What the source of each shipped policy claims, as something that can be measured here.

A claim names a workload and an engine on which a figure of the policy is less or more than that of
`fcfs` on the same requests. `tools/policies_measure.py` holds them; `docs/policies.md` shows how.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`figure` of the policy (with `options`) is `less` or `more` than that of fcfs.

    Of mean latency `e2e.bound` is what a run has that is overloaded: over all of it, over what no
    scheduler can beat with these requests.
    """

    figure: str
    direction: str
    workload: str = "log-uniform"
    load: float = 0.9
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the policy."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine beside those of the tables."""
    lacks: str = ""
    """What the policy has in its source and not here, if the claim may fail for want of it."""


TIGHT = {"num_blocks": 350}
ORACLE = {"length_predictor": "oracle"}
MANY = "agents(num_users=4)"
PROMPTS = "azure-code(tiers='all(ttft=2)')"
AMPLE = {"max_num_seqs": 256, "num_blocks": 20_000}
DUE = "log-uniform(deadlines=(1.0, 30.0))"
SWAP = (
    "its source swaps the KV of whoever is preempted out and in again; here it is computed anew, "
    "as far as the prefix cache has lost it"
)

CLAIMS: dict[str, Claim] = {
    "andes": Claim(figure="e2e.bound", direction="less", load=1.2, lacks=SWAP),
    "blendserve": Claim(
        figure="makespan",
        direction="less",
        load=20.0,
        engine=ORACLE,
        lacks="its source packs phases that overlap on the device; steps cost the sum here",
    ),
    "conserve": Claim(figure="attainment", direction="more", workload="tiers", load=1.0),
    "dlpm": Claim(figure="gap", direction="less", workload="two-users", load=1.1),
    "early-rejection": Claim(
        figure="attainment",
        direction="more",
        workload=PROMPTS,
        load=1.4,
        options={"ttft": 1.5},
        engine=AMPLE,
    ),
    "edf": Claim(figure="attainment", direction="more", workload=DUE, load=1.2),
    "fastserve": Claim(figure="e2e.bound", direction="less", load=1.2, lacks=SWAP),
    "hrrn": Claim(figure="e2e.bound", direction="less", load=1.2),
    "k-lpm": Claim(figure="prefix_hits", direction="more", workload=MANY, load=1.0, engine=TIGHT),
    "least-computed": Claim(
        figure="recomputed",
        direction="less",
        load=1.2,
        engine=TIGHT,
        lacks="its source compares it with a victim that had computed much; that of fcfs came last",
    ),
    "lpm": Claim(figure="prefix_hits", direction="more", workload=MANY, load=1.0, engine=TIGHT),
    "ltr": Claim(figure="e2e.bound", direction="less", load=1.2, engine=ORACLE, lacks=SWAP),
    "mc-sf": Claim(figure="e2e.bound", direction="less", load=1.2, engine=ORACLE),
    "past-future": Claim(figure="preempted", direction="less", load=0.95, engine=TIGHT),
    "plas": Claim(figure="e2e.mean", direction="less", workload="agents", load=1.0),
    "prefill-first": Claim(figure="itl.p99", direction="more"),
    "priority": Claim(figure="attainment", direction="more", workload="tiers", load=1.0),
    "qoserve": Claim(figure="attainment", direction="more", workload="tiers", load=1.0),
    "residual-sjf": Claim(figure="e2e.bound", direction="less", load=1.2),
    "sarathi": Claim(figure="itl.p99", direction="less", options={"step_tokens": 128}),
    "slai": Claim(figure="ttft.p50", direction="less"),
    "trail": Claim(figure="e2e.bound", direction="less", load=1.2, engine=ORACLE, lacks=SWAP),
    "vtc": Claim(figure="gap", direction="less", workload="two-users", load=1.1),
}
