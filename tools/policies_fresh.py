"""Measures claims of `docs/policies.md` on seeds that the page has not seen.

    python tools/policies_fresh.py --first 100 --seeds 8 --jobs 2

Only policies with claims are simulated, each on the scenes of its claims: a quarter of the work of
`policies_measure`. Figures are kept after each seed, in `benchmarks/results/policies_fresh.json`,
and `policies_table` says on the page what came of it. `--check` only prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

from policylab.sim.experiment import in_processes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.policies_claims import CLAIMS
from tools.policies_figures import (
    BASE,
    FORMAT,
    Kept,
    Part,
    kept,
    measured,
    read,
    with_seeds,
    written,
)
from tools.policies_measure import NUM_SEEDS
from tools.policies_scenes import SCENES
from tools.policies_table import FRESH, RESULTS, decided_claims, lost_verdicts

FIRST = 100


def claimed_on(scene: str) -> tuple[str, ...]:
    """Policies of which something is claimed there, and fcfs."""
    names = (name for name, of in CLAIMS.items() if any(c.scene == scene for c in of.claims))
    return (BASE, *sorted(names))


def simulated(page: Kept, seeds: range, *, jobs: int = 1) -> Iterator[Kept]:
    """The figures of claims, for one seed after the other: all else is as it was for the page."""
    heads = {name: {**scene, "policies": {}} for name, scene in page["scenes"].items()}
    parts = []
    for name, head in heads.items():
        rate = inf if head["rate"] is None else head["rate"]
        parts.append(Part(SCENES[name], claimed_on(name), page["requests"], rate, 0))
    for seed in seeds:
        results = in_processes(measured, [part._replace(seed=seed) for part in parts], jobs)
        scenes = {
            name: {**head, "policies": {policy: kept(pair) for policy, pair in pairs.items()}}
            for (name, head), pairs in zip(heads.items(), results, strict=True)
        }
        yield {"format": FORMAT, "requests": page["requests"], "seeds": 1, "scenes": scenes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--first", type=int, default=FIRST, metavar="S", help="the first seed")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="J")
    parser.add_argument("--check", action="store_true", help="simulate nothing, say what is kept")
    parsed = parser.parse_args()
    if not parsed.check:
        found: Kept | None = None
        seeds = range(parsed.first, parsed.first + parsed.seeds)
        for more in simulated(read(RESULTS), seeds, jobs=parsed.jobs):
            found = more if found is None else with_seeds(found, more)
            FRESH.write_text(written(found), encoding="utf-8")
    page, fresh = read(RESULTS), read(FRESH)
    lost = lost_verdicts(page, fresh)
    print(f"{len(decided_claims(page)) - len(lost)} of {len(decided_claims(page))} keep theirs")
    for policy, claim, words in lost:
        print(f"{policy}, {claim.figure} on {claim.scene}: {words}")


if __name__ == "__main__":
    main()
