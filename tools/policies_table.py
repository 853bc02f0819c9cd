"""Writes `docs/policies.md`: the policies that ship, and what of their sources' claims is measured.

    python tools/policies_table.py

What a policy does, its source and its options are read from the policy; claims stand in
`policies_claims`, workloads and engines in `policies_scenes`, figures are those that
`policies_measure` has kept.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from math import isinf
from pathlib import Path
from typing import Any

from engine.sched.policies import POLICIES
from policylab.sim.estimate import LEVEL, corrected
from policylab.sim.figures import MAX_RECOMPUTED, MIN_THROUGHPUT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.policies_claims import CLAIMS, HIGHER, Claim, Claims
from tools.policies_figures import BASE, Kept, Outcome, is_relative, outcome, policies_of, read
from tools.policies_scenes import SCENES, SHOWN, Scene

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "policies.md"
RESULTS = ROOT / "benchmarks" / "results" / "policies.json"
FRESH = ROOT / "benchmarks" / "results" / "policies_fresh.json"
"""The figures of claims on other seeds, from `policies_measure.py --fresh`."""

NEARLY = "≈"
DECIDED = ("as claimed", "the other way")
NO_REASON = "The reason is not known"
HEAD = """# Policies that ship

A scheduling policy decides which requests run first and which are preempted.
`LLM(scheduling_policy="edf", policy_options={"default_deadline": 5.0})` selects one. Each policy
is one file in `engine/sched/policies/`, whose docstring explains its options. Times are in
seconds, lengths in tokens. `metronome policies --policies fcfs,edf,...` compares policies on a
virtual clock; [policy-guide.md](policy-guide.md) shows how to write another.

`python tools/policies_table.py` writes this page from docstrings and from the figures that
`python tools/policies_measure.py --jobs 2` saves.

| name | what it does | source | options and defaults |
|---|---|---|---|
"""
CLAIMED = """
## What their sources claim, and what was measured

Everything here is simulated, with the engine's scheduler and an assumed cost: {cost}.
Signs and rough sizes are meaningful; numbers are not those of a machine or a paper. Each policy
gets the same requests as `fcfs`. A difference is in % of the figure of `fcfs` (the mean of the
logarithms of the seeds' ratios), or in points (`pt`) for shares. The number after ± is half of a
95 % interval, from {seeds} seeds; undecided differences are in parentheses.

Verdicts are corrected for the number of claims (Holm), so that with 95 % probability none of them
is wrong. `undecided among {claims}` is decided if the claim is taken alone. The second column has
the source's words and its own measure.

| policy | its source says | figure, workload | `{base}` | difference | verdict |
|---|---|---|---|---|---|
"""
TABLES = """
## All policies on six workloads, and some on two others

`=`: equal to `fcfs` to the last digit; `≈`: less than 0.05 from it either way, and undecided. `-`:
no figure, for instance because too many seeds are overloaded, where a mean would only show how long
the run was.

* `readers`: share of requests whose reader, who wants the first token within a second and then five
  a second, gets the last one in time.
* `programs`: seconds that a program waited for answers per output token; mean over programs.
* `gap`: largest difference of the service of two users while both wait (as VTC counts it).
* `recomputed`: share of all computed tokens that had been computed before.
* `adapter_loads`, `adapter_reads`: how often an adapter was loaded into a slot, and read from a
  disk, per request with an adapter.

The other figures are those of `metronome compare`. `ltr`, `trail`, `mc-sf` and `blendserve` use the
length predictor (`none`: the longest possible), `past-future` learns lengths by itself.
"""


def page(kept: Kept | None, scenes: dict[str, Scene] | None = None) -> str:
    """The whole page; without figures if none are kept."""
    parts = [HEAD, *(_row(name, policy) for name, policy in sorted(POLICIES.items()))]
    if kept is not None:
        scenes = SCENES if scenes is None else scenes
        num_claims = len(all_claims(kept))
        about = {"seeds": kept["seeds"], "base": BASE, "claims": num_claims, "cost": _cost(kept)}
        parts.append(CLAIMED.format(**about))
        parts += [
            *_claims(kept),
            *_other_rates(kept),
            *_fresh(kept),
            *_lacks(kept),
            *_collapses(kept),
            TABLES,
        ]
        for name in kept["scenes"]:
            parts += _scene(name, scenes[name], kept)
    return "".join(parts)


def _row(name: str, policy: type) -> str:
    module = sys.modules[policy.__module__]
    source = _source(module)
    options = ", ".join(
        f"`{each.name}={each.default!r}`"
        for each in inspect.signature(policy).parameters.values()
        if each.default is not each.empty
    )
    cells = (f"`{name}`", _first_line(policy), source, options or "none")
    return "| " + " | ".join(cell.replace("``", "`").replace("|", "\\|") for cell in cells) + " |\n"


def _source(module: object) -> str:
    """Where a policy is from, if the first line of its module ends with that."""
    line = _first_line(module).rstrip(".")
    return line.partition(" (")[2][:-1] if line.endswith(")") and " (" in line else line


def _first_line(of: object) -> str:
    return (inspect.getdoc(of) or "").split("\n", 1)[0]


def of_claim(kept: Kept, policy: str, claim: Claim) -> Outcome | None:
    """What came of a claim; ``None`` where there is no figure."""
    scene = kept["scenes"].get(claim.scene, {"policies": {}})
    found = scene["policies"].get(policy)
    return None if found is None else outcome(found, claim.figure)


def verdict(found: Outcome | None, claim: Claim) -> str:
    """Whether it is as claimed, looked at alone."""
    if found is None:
        return "no figure"
    if found.is_equal:
        return "equal"
    if not found.is_decided:
        return "undecided"
    return DECIDED[(found.by.value > 0) != (claim.direction == HIGHER)]


def all_claims(kept: Kept) -> list[tuple[str, Claim]]:
    """Claims of policies that have figures, in the order of the page."""
    return [
        (policy, claim)
        for policy in policies_of(kept)
        for claim in CLAIMS.get(policy, Claims(claims=())).claims
    ]


def verdicts(kept: Kept, claims: Sequence[tuple[str, Claim]]) -> list[str]:
    """The verdict on each claim, corrected for their number."""
    found = [of_claim(kept, *each) for each in claims]
    chances = corrected([1.0 if each is None else each.chance for each in found])
    words = []
    for each, (_, claim), likely in zip(found, claims, chances, strict=True):
        alone = verdict(each, claim)
        is_chance = alone in DECIDED and likely > 1.0 - LEVEL
        words.append(f"undecided among {len(claims)}" if is_chance else alone)
    return words


def _cost(kept: Kept) -> str:
    """What a step costs in all scenes."""
    (cost,) = {scene["cost"] for scene in kept["scenes"].values()}
    return str(cost)


def _other_rates(kept: Kept) -> Iterator[str]:
    """A word on figures that were measured when a load was another rate."""
    if "rates" in kept:
        yield f"\n{kept['rates']}\n"


def _claims(kept: Kept) -> Iterator[str]:
    claims = all_claims(kept)
    for (policy, claim), verdict in zip(claims, verdicts(kept, claims), strict=True):
        found = of_claim(kept, policy, claim)
        theirs = "-" if found is None else number(claim.figure, found.theirs)
        yield (
            f"| `{policy}` | {claim.words} | `{claim.figure}` {claim.direction}, "
            f"`{claim.scene}` | {theirs} | {change(found)} | {verdict} |\n"
        )


def _fresh(kept: Kept) -> Iterator[str]:
    """What became of the verdicts on seeds that the page has not seen."""
    if not FRESH.exists() or kept["scenes"].keys() != SCENES.keys():
        return
    fresh = read(FRESH)
    decided = decided_claims(kept)
    if not decided:
        return
    lost = lost_verdicts(kept, fresh)
    num_same, seeds = len(decided) - len(lost), fresh["seeds"]
    yield f"\nOn {seeds} further seeds (`python tools/policies_measure.py --fresh`) {num_same} of "
    yield f"the {len(decided)} decided claims above keep their verdict"
    named = [
        f"`{policy}`, `{claim.figure}`, `{claim.scene}`: {words}" for policy, claim, words in lost
    ]
    yield f"; these do not: {'; '.join(named)}.\n" if lost else ".\n"


def decided_claims(kept: Kept) -> list[tuple[str, Claim, str]]:
    """Claims with a verdict, which is the third of each."""
    claims = all_claims(kept)
    both = zip(claims, verdicts(kept, claims), strict=True)
    return [(*each, words) for each, words in both if words in DECIDED]


def lost_verdicts(kept: Kept, fresh: Kept) -> list[tuple[str, Claim, str]]:
    """Claims that are decided by the kept figures, and otherwise or not by fresh ones: what these
    say is the third of each."""
    decided = decided_claims(kept)
    found = verdicts(fresh, [(policy, claim) for policy, claim, _ in decided])
    both = zip(decided, found, strict=True)
    return [(policy, claim, now) for (policy, claim, was), now in both if now != was]


def _lacks(kept: Kept) -> Iterator[str]:
    """What policies lack here; of those none of whose claims is seen, too."""
    who: dict[str, list[str]] = {}
    for policy in policies_of(kept):
        claims = CLAIMS.get(policy)
        if claims is None or policy == BASE:
            continue
        seen = any(verdict(of_claim(kept, policy, c), c) == "as claimed" for c in claims.claims)
        what = [] if seen else ["the effect that its source claims"]
        what += [claims.lacks] if claims.lacks else []
        if what:
            who.setdefault("; ".join(what), []).append(f"`{policy}`")
    if who:
        yield "\nMissing here, compared with the sources:\n\n"
        yield from (f"* {', '.join(policies)}: {what}.\n" for what, policies in who.items())


def _collapses(kept: Kept) -> Iterator[str]:
    """Which policies serve little or compute much again, and where: a line for each reason."""
    where: dict[str, list[str]] = {}
    for name, scene in kept["scenes"].items():
        for policy, found in scene["policies"].items():
            if policy != BASE and (words := _collapse(found)):
                where.setdefault(policy, []).append(f"on `{name}` it {words}")
    if where:
        yield f"\nPolicies that serve less than {MIN_THROUGHPUT:g} of what `{BASE}` does, or "
        yield f"compute more than {100 * MAX_RECOMPUTED:.0f} % again:\n\n"
    reasons: dict[str, list[str]] = {}
    for policy, places in sorted(where.items()):
        why = CLAIMS[policy].costs if policy in CLAIMS else ""
        reasons.setdefault(f"Reason: {why}" if why else NO_REASON, []).append(
            f"`{policy}`: {', '.join(places)}."
        )
    for reason, policies in reasons.items():
        yield f"* {' '.join(policies)} {reason}.\n"


def _collapse(found: dict[str, Any]) -> str:
    rate, share = (outcome(found, each) for each in ("tokens_per_second", "recomputed"))
    words = []
    # What fcfs computes again, too, is not the policy's doing.
    if share and share.ours > MAX_RECOMPUTED and share.ours > 1.25 * share.theirs:
        words.append(f"computes {100 * share.ours:.0f} % again")
    if rate and rate.ours < MIN_THROUGHPUT * rate.theirs:
        words.append(f"serves {rate.ours / rate.theirs:.2f}")
    return " and ".join(words)


def _scene(name: str, scene: Scene, kept: Kept) -> Iterator[str]:
    about = kept["scenes"][name]
    load = "all at once" if about["load"] is None else f"load {about['load']:g}"
    rate = "" if about["rate"] is None else f", {about['rate']:.3g} requests a second"
    yield f"\n### `{name}`: {scene.shows}\n\n`{about['workload']}`, {load}{rate}; "
    yield f"{about['engine']}.\n\n"
    names = [*SHOWN, *scene.figures]
    yield "| | " + " | ".join(f"`{each}`" for each in names) + " |\n"
    yield "|---" * (len(names) + 1) + "|\n"
    base = about["policies"][BASE]
    found = [outcome(base, each) for each in names]
    cells = [
        "-" if each is None else number(figure, each.ours)
        for figure, each in zip(names, found, strict=True)
    ]
    yield f"| `{BASE}` | " + " | ".join(cells) + " |\n"
    equal = []
    for policy in sorted(about["policies"]):
        if policy != BASE:
            each = about["policies"][policy]
            cells = [change(outcome(each, figure)) for figure in names]
            over = f", overloaded in {n} of {kept['seeds']}" if (n := each["overloaded"]) else ""
            if set(cells) == {"="} and each["overloaded"] == base["overloaded"]:
                equal.append(f"`{policy}`")
            else:
                yield f"| `{policy}`{over} | " + " | ".join(cells) + " |\n"
    peak = outcome(base, "kv_peak")
    if peak is not None:
        yield f"\n`{BASE}` uses at most {100 * peak.ours:.0f} % of the KV blocks.\n"
    if equal:
        yield f"Equal to `{BASE}` in all figures: {', '.join(equal)}.\n"


def number(figure: str, value: float) -> str:
    """A figure as such."""
    if not is_relative(figure):
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 999 else f"{value:.3g}"


def change(found: Outcome | None) -> str:
    """How a figure differs from that of fcfs."""
    if found is None:
        return "-"
    if found.is_equal:
        return "="
    if not found.is_ratio and abs(found.by.value) > 1.0:  # of one that is 0 somewhere
        return f"{found.by.value:+.3g}" if found.is_decided else f"({found.by.value:+.3g})"
    unit = " %" if found.is_ratio else " pt"
    low, value, high = (100.0 * end for end in (found.by.low, found.by.value, found.by.high))
    half = (high - low) / 2.0
    digits = 0 if abs(value) >= 10.0 else 1
    within = "" if isinf(half) else f" ±{half:.{digits}f}"
    words = f"{value:+.{digits}f}{within}{unit}"
    if not found.is_decided and max(abs(value), half) < 0.05:
        return NEARLY
    return words if found.is_decided else f"({words})"


def written_page() -> str:
    """The page of the figures that are kept."""
    return page(read(RESULTS) if RESULTS.exists() else None)


def write_page() -> None:
    """Write the page of the kept figures."""
    TARGET.write_text(written_page(), encoding="utf-8")


if __name__ == "__main__":
    write_page()
