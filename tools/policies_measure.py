"""Measures the shipped policies on several workloads, and writes `docs/policies.md`.

    python tools/policies_measure.py --jobs 2            # all policies: half an hour
    python tools/policies_measure.py --only my-own       # a new one, added to the kept figures
    python tools/policies_measure.py --fresh --jobs 2    # the claims alone, on seeds from 100 on
    python tools/policies_measure.py --scenes adapters   # one workload, added to the kept figures

Figures are kept after each seed in `benchmarks/results/policies.json`, those of other seeds in
`policies_fresh.json`. `python tools/policies_table.py` writes the page without simulating.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from engine.sched.policies import POLICIES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.policies_claims import CLAIMS
from tools.policies_figures import (
    BASE,
    Kept,
    check_same_scenes,
    heads_of,
    read,
    simulate,
    with_policies,
    with_scenes,
    with_seeds,
    written,
)
from tools.policies_scenes import SCENES
from tools.policies_table import FRESH, RESULTS, write_page

NUM_REQUESTS, NUM_SEEDS, FIRST_FRESH = 1000, 8, 100


def claimed_on(scene: str) -> tuple[str, ...]:
    """fcfs, and the policies whose sources claim something of this scene."""
    names = (name for name, of in CLAIMS.items() if any(c.scene == scene for c in of.claims))
    return (BASE, *sorted(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    which = parser.add_mutually_exclusive_group()
    parser.add_argument("--scenes", metavar="NAMES", help="measure these workloads alone")
    which.add_argument("--only", metavar="NAMES", help="measure these policies alone")
    which.add_argument("--fresh", action="store_true", help="measure claims alone, on other seeds")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, metavar="N")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="J")
    parsed = parser.parse_args()
    chosen = tuple(parsed.only.split(",")) if parsed.only else tuple(sorted(POLICIES))
    scenes = parsed.scenes.split(",") if parsed.scenes else list(SCENES)
    target = FRESH if parsed.fresh else RESULTS
    policies = {name: claimed_on(name) if parsed.fresh else wanted(name, chosen) for name in scenes}
    had = read(RESULTS) if parsed.only or parsed.fresh or parsed.scenes else None
    same = read(target) if parsed.scenes else had
    num_requests = parsed.requests if same is None else same["requests"]
    if had is not None and parsed.fresh:
        heads = {name: had["scenes"][name] for name in scenes}
    else:
        heads = heads_of({name: SCENES[name] for name in scenes}, num_requests)
    if had is not None and not parsed.scenes:
        check_same_scenes(had, {**had, "scenes": heads})
    first = FIRST_FRESH if parsed.fresh else 0
    num_seeds = parsed.seeds if had is None or parsed.fresh else had["seeds"]
    seeds = range(first, first + num_seeds)
    found: Kept | None = None
    began = time.monotonic()
    for more in simulate(heads, policies, num_requests, seeds, parsed.jobs):
        found = more if found is None else with_seeds(found, more)
        print(f"{found['seeds']} of {len(seeds)} seeds, {time.monotonic() - began:.0f} s")
        if not (parsed.only or parsed.scenes):
            target.write_text(written(found), encoding="utf-8")
    if found is not None and parsed.scenes:
        target.write_text(written(with_scenes(read(target), found)), encoding="utf-8")
    elif found is not None and had is not None and parsed.only:
        RESULTS.write_text(written(with_policies(had, found)), encoding="utf-8")
    write_page()


def wanted(scene: str, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """The chosen policies that are measured on this scene."""
    shown = SCENES[scene].policies
    return tuple(policy for policy in chosen if not shown or policy in shown)


if __name__ == "__main__":
    main()
