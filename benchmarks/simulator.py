"""Measures how fast the policy lab simulates on one core, the making of requests included.

    python benchmarks/simulator.py [--rounds 3] [--million] [--json FILE]

The azure hour   19,366 requests at 5.53 a second, 256 seats; stretched and step by step
long outputs     32 seats, load 0.8, outputs of 500 to 2,000 tokens: times real time
a busy step      log-uniform requests at load 0.9, 32 and 256 seats, step by step: us a step
--million        a million requests, and the memory that they take

Step costs are the defaults of ``StepCost``, the policy is ``fcfs``. Each case runs in a process of
its own; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import keep

from policylab.sim.run import Engine, rate_at, run
from policylab.sim.workloads import find_workload

WIDE = Engine(max_num_seqs=256, max_num_batched_tokens=2048, num_blocks=40_000)
CASES: dict[str, tuple[str, Engine, float | None]] = {
    "azure hour": ("azure-conv(num_requests=19366)", WIDE, None),
    "azure hour, stepped": (
        "azure-conv(num_requests=19366)",
        replace(WIDE, stretches=False),
        None,
    ),
    "long outputs": (
        "log-uniform(num_requests=1000,output_tokens=(500,2000))",
        Engine(num_blocks=6000),
        0.8,
    ),
    "32 seats, stepped": ("log-uniform(num_requests=2000)", Engine(stretches=False), 0.9),
    "256 seats, stepped": (
        "log-uniform(num_requests=6000)",
        replace(WIDE, num_blocks=8000, stretches=False),
        0.9,
    ),
    "a million requests": ("azure-conv(num_requests=1000000)", WIDE, None),
}
WANTED = {
    "azure hour": ("seconds", 5.0),
    "azure hour, stepped": ("seconds", 25.0),
    "long outputs": ("times_real", 1000.0),
    "32 seats, stepped": ("us_a_step", 70.0),
    "256 seats, stepped": ("us_a_step", 150.0),
    "a million requests": ("gib", 1.0),
}
LARGER_IS_BETTER = ("times_real",)


def one(name: str) -> dict[str, float]:
    """Run a case in this process. Finding the rate for a load is not timed."""
    text, engine, load = CASES[name]
    workload = find_workload(text)
    rate = None if load is None else rate_at(load, workload, engine)
    began = time.process_time()
    done = run("fcfs", workload, engine, seed=0, rate=rate)
    seconds = time.process_time() - began
    simulated = float(np.nanmax(done.requests.times("last")))
    return {
        "seconds": seconds,
        "times_real": simulated / seconds,
        "us_a_step": 1e6 * seconds / done.totals["num_steps"],
        "num_steps": done.totals["num_steps"],
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CASES)
    parsed = parser.parse_args()
    if parsed.one:
        print(json.dumps(one(parsed.one)))
        return
    names = [name for name in CASES if parsed.million or name != "a million requests"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(parsed.rounds):
        for name in names:
            if turn and name == "a million requests":
                continue
            command = [sys.executable, __file__, "--one", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout))
    kept: dict[str, Any] = {}
    for name, runs in found.items():
        kept[name] = {key: median(each[key] for each in runs) for key in runs[0]}
        figure, wanted = WANTED[name]
        value = kept[name][figure]
        is_met = value >= wanted if figure in LARGER_IS_BETTER else value <= wanted
        print(f"{name:22} {figure} {value:9.2f}  wanted {wanted:g}  {'' if is_met else 'MISSED'}")
        print(" " * 22, ", ".join(f"{key} {each:.1f}" for key, each in kept[name].items()))
    keep(parsed.json, cases=kept, rounds=parsed.rounds)


if __name__ == "__main__":
    main()
