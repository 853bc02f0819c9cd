"""Measures the policies that ship on six workloads, and writes `docs/policies.md` from that.

    python tools/policies_measure.py --jobs 2                # what is missing: half an hour
    python tools/policies_measure.py --jobs 2 --afresh       # all, whatever is kept
    python tools/policies_measure.py --jobs 2 --seeds 20     # more seeds than those kept
    python tools/policies_measure.py --only my-own           # one that is new, added to the others

Figures are kept after each seed in `benchmarks/results/policies.json`, and what is kept is not
simulated again. `python tools/policies_table.py` writes the page without simulating.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.sched.policies import POLICIES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.policies_figures import (
    Kept,
    policies_of,
    read,
    simulate,
    with_policies,
    with_seeds,
    written,
)
from tools.policies_scenes import SCENES, Scene
from tools.policies_table import RESULTS, TARGET, page

NUM_REQUESTS, NUM_SEEDS = 1000, 8


def simulated(
    kept: Kept | None,
    policies: Sequence[str],
    *,
    num_requests: int = NUM_REQUESTS,
    num_seeds: int = NUM_SEEDS,
    jobs: int = 1,
    keep: Callable[[Kept], None] = lambda kept: None,
    scenes: dict[str, Scene] | None = None,
) -> Kept | None:
    """What is kept with what is missing of these policies' figures, kept anew after each seed.

    Of all policies seeds are added to those kept; of some, all kept seeds are simulated."""
    scenes = SCENES if scenes is None else scenes
    has_all = kept is None or set(policies) >= set(policies_of(kept))
    done = 0 if kept is None or not has_all else kept["seeds"]
    seeds = range(done, num_seeds if kept is None or has_all else kept["seeds"])
    found: Kept | None = None
    began = time.monotonic()
    for more in simulate(
        scenes, policies, num_requests=num_requests, seeds=seeds, jobs=jobs, had=kept
    ):
        found = more if found is None else with_seeds(found, more)
        print(f"{found['seeds']} of {len(seeds)} seeds, {time.monotonic() - began:.0f} s")
        if has_all:
            keep(found if kept is None else with_seeds(kept, found))
    if found is None or kept is None:
        return found or kept
    both = with_seeds(kept, found) if has_all else with_policies(kept, found)
    keep(both)
    return both


def _keep(kept: Kept) -> None:
    RESULTS.write_text(written(kept), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--afresh", action="store_true", help="forget the figures that are kept")
    parser.add_argument("--only", metavar="NAMES", help="measure these policies alone")
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"default: as kept, or {NUM_REQUESTS}"
    )
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="J")
    parsed = parser.parse_args()
    had = read(RESULTS) if RESULTS.exists() and not parsed.afresh else None
    kept = simulated(
        had,
        parsed.only.split(",") if parsed.only else sorted(POLICIES),
        num_requests=parsed.requests or (had["requests"] if had else NUM_REQUESTS),
        num_seeds=parsed.seeds,
        jobs=parsed.jobs,
        keep=_keep,
    )
    TARGET.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
