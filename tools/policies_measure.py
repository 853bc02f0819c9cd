"""Measures all shipped policies on six workloads, and what the source of each claims.

    python tools/policies_measure.py [--seeds 8] [--requests 1500] [--jobs 2] [--only vtc,lpm]

Writes `benchmarks/results/policies.json`, and `docs/policies.md` from it. Under two hours on two
cores. `python tools/policies_table.py` writes the page anew without measuring.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from engine.sched.policies import POLICIES
from engine.sim.compare import Cell, Experiment, compare
from engine.sim.run import Engine, Variant
from engine.sim.workloads import find_workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.policies_claims import CLAIMS, Claim
from tools.policies_table import RESULTS, TARGET, table

WORKLOADS = ("log-uniform", "azure-conv", "tiers", "two-users", "conversations", "agents")
LOAD = 0.9
PREDICTOR = "history"
FIGURES = ("ttft.mean", "ttft.p99", "itl.p99", "e2e.mean", "tokens_per_second", "recomputed")


def measured(
    policies: Sequence[str], workloads: Iterable[str], seeds: int, requests: int, jobs: int
) -> dict[str, Any]:
    """Every figure of every policy beside that of fcfs, and each claim."""
    found: dict[str, Any] = {"seeds": seeds, "requests": requests, "workloads": {}, "claims": {}}
    names = ["fcfs", *(name for name in policies if name != "fcfs")]
    for text in workloads:
        begun = time.monotonic()
        [cell] = compare(
            Experiment(
                policies=names,
                workload=find_workload(text, num_requests=requests),
                engine=Engine(length_predictor=PREDICTOR),
                loads=[LOAD],
                seeds=range(seeds),
            ),
            jobs=jobs,
        )
        found["workloads"][text] = _table(cell)
        print(f"{text}: {time.monotonic() - begun:.0f} s", flush=True)
    for name in names[1:]:
        found["claims"][name] = claimed(name, CLAIMS[name], seeds, requests, jobs)
        print(f"{name}: {found['claims'][name]['verdict']}", flush=True)
    return found


def claimed(name: str, claim: Claim, seeds: int, requests: int, jobs: int) -> dict[str, Any]:
    """A claim, beside what was found."""
    [cell] = compare(
        Experiment(
            policies=["fcfs", Variant(name, claim.options) if claim.options else name],
            workload=find_workload(claim.workload, num_requests=requests),
            engine=Engine(**{"length_predictor": PREDICTOR, **claim.engine}),
            loads=[claim.load],
            seeds=range(seeds),
        ),
        jobs=jobs,
    )
    by = cell.difference(1, claim.figure).by
    holds = by.high < 0 if claim.direction == "less" else by.low > 0
    opposite = by.low > 0 if claim.direction == "less" else by.high < 0
    found = _row(cell, 1, (claim.figure, "tokens_per_second", "recomputed"))
    verdict = "holds" if holds else "the opposite holds" if opposite else "undecided"
    return {**found, "verdict": verdict}


def _table(cell: Cell) -> dict[str, Any]:
    rows = {name: _row(cell, place, FIGURES) for place, name in enumerate(cell.names)}
    return {"rate": cell.rate, "rows": rows}


def _row(cell: Cell, place: int, names: Sequence[str]) -> dict[str, Any]:
    """Mean and half of an interval of each figure, and of its difference from that of fcfs."""
    row: dict[str, Any] = {"overloaded": cell.num_overloaded(place)}
    for name in names:
        each = cell.difference(place, name)
        half = (each.by.high - each.by.low) / 2
        row[name] = [_plain(each.ours.value), _plain(each.by.value), _plain(half), each.verdict]
    return row


def _plain(value: float) -> float | None:
    return float(f"{value:.6g}") if isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", help="these policies alone, by name; nothing is written")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    asked = parser.parse_args()
    policies = asked.only.split(",") if asked.only else sorted(POLICIES)
    workloads = [name for name in asked.workloads.split(",") if name]
    found = measured(policies, workloads, asked.seeds, asked.requests, asked.jobs)
    if asked.only:
        print(json.dumps(found, indent=1))
    else:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        TARGET.write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
