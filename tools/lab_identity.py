"""Simulates real runs again: plans must be the same, and must differ for other engines.

    python tools/lab_identity.py [--steps 10000] [--policies fcfs,vtc,...]

Serves the shipped model under memory pressure, with shared prefixes, prompts in chunks, and one or
two steps in flight, until each policy has planned this many steps in several logs. Each log is
simulated again at its recorded times. For engines with 5 % more or fewer KV blocks, chunks twice as
large, or another choice of whom to preempt, the plans of at least one log must differ.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from policylab.sim.real import run_real
from policylab.sim.recorded import Log, read_log, resimulate
from policylab.sim.run import Engine
from policylab.sim.workloads import find_workload

POLICIES = (
    *("fcfs", "residual-sjf", "vtc", "lpm", "least-computed", "sarathi", "fastserve"),
    *("hrrn", "andes"),
)
WORKLOAD = (
    "log-uniform(num_requests=300,prompt_tokens=(8,200),output_tokens=(4,100),shared_prefix=64)"
)
SIZES = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "num_blocks": 90}
RATE = 400.0


def other_engines(log: Log) -> dict[str, dict[str, Any]]:
    """Engines whose plans should not be those of the log."""
    return {
        "5 % fewer KV blocks": {"num_blocks": round(0.95 * log.header.num_blocks)},
        "5 % more KV blocks": {"num_blocks": round(1.05 * log.header.num_blocks)},
        "chunks twice as large": {"max_num_batched_tokens": 2 * SIZES["max_num_batched_tokens"]},
        "another victim": {"scheduling_policy": "least-computed", "policy_options": {}},
    }


def prove(policy: str, num_steps: int, out: Path) -> bool:
    """Record and check the logs of one policy, and print a line."""
    workload = find_workload(WORKLOAD)
    steps = logs = preempted = hits = 0
    wrong = []
    red: dict[str, int] = {}
    while steps < num_steps:
        path = out / f"{policy}-{logs}.log"
        engine = Engine(**SIZES, depth=1 + logs % 2)
        run_real(policy, workload, engine, seed=logs, rate=RATE, step_log=path, log_level="error")
        log = read_log(path)
        outcome, again = resimulate(path, log)
        if outcome.difference is not None:
            wrong.append(f"{path.name}: {outcome}")
        elif list(again.requests.rows()) != list(log.run.requests.rows()):
            wrong.append(f"{path.name}: the same plans, and other times of requests")
        for name, changes in other_engines(log).items():
            differs = resimulate(path, log, **changes)[0].difference is not None
            red[name] = red.get(name, 0) + differs
        steps += log.run.totals["num_plans"]
        preempted += log.run.totals["num_preemptions"]
        hits += log.run.totals["prefix_hits"]
        logs += 1
        path.unlink()
    others = ", ".join(f"{name} {count} of {logs}" for name, count in red.items())
    print(
        f"{policy}: {steps} steps in {logs} logs, {preempted} preemptions, {hits} tokens found in "
        f"the cache, {len(wrong)} logs differ; of other engines: {others}",
        *wrong,
        sep="\n  ",
        flush=True,
    )
    if policy == "least-computed":
        red.pop("another victim")  # its own
    return not wrong and preempted > 0 and hits > 0 and logs > 1 and all(red.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000, help="of each policy, at least")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        right = [prove(name, parsed.steps, Path(out)) for name in parsed.policies.split(",")]
    print(f"{sum(right)} of {len(right)} policies: every plan the same")
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
