"""Simulates shipped policies on the scenes of `policies_scenes`, and keeps their figures as JSON.

Each policy gets the same requests as fcfs, and both count the same ones of them: those after the
longer warm-up of the two. So a policy can be measured anew, or added, without the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import expm1, inf, isnan, log, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policylab.cli.lab import cost_line, engine_line
from policylab.sim.estimate import Estimate, chance, mean_over
from policylab.sim.experiment import in_processes
from policylab.sim.figures import Figures, figures, period_of
from policylab.sim.promises import e2e, ttft
from policylab.sim.run import Run, rate_at, run
from policylab.sim.steady import OVERLOADED, Window
from policylab.sim.workloads import Workload, find_workload
from tools.policies_scenes import SCENES, SHOWN, Scene

BASE = "fcfs"
FORMAT = 1
DIGITS = 6  # that are kept of a figure
MIN_SEEDS = 0.75  # of all, that must have a figure: means of fewer say what was chosen

SHARES = ("attainment", "jain", "preempted", "readers", "recomputed", "refused", "kv_peak")
READER_TTFT = 1.0  # seconds in which a reader wants to see something
READER_TBT = 0.2  # seconds a token that a reader takes


class Part(NamedTuple):
    """Policies on one scene with the requests of one seed."""

    scene: Scene
    policies: tuple[str, ...]
    num_requests: int
    rate: float
    seed: int


Values = dict[str, float]
Kept = dict[str, Any]
"""The content of the file: scenes, in each policies, in each figures, of each ours and theirs by
seed."""


class Pair(NamedTuple):
    """A policy's figures, and those of fcfs for the same requests."""

    ours: Values
    theirs: Values
    is_overloaded: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A figure of a policy next to that of fcfs, over seeds."""

    ours: float
    theirs: float
    by: Estimate
    """How much more ours is, with an interval that holds the true value 19 times in 20. A share of
    theirs if ``is_ratio``, by the mean of the logarithms of ratios: a seed in which both are large
    then counts no more than another."""
    is_ratio: bool
    is_equal: bool
    chance: float = 1.0
    """How likely a difference is at least as large if there is none."""

    @property
    def is_decided(self) -> bool:
        """Whether it is more than chance."""
        return not self.is_equal and not self.by.holds_zero


def workload_of(scene: Scene, num_requests: int) -> Workload:
    return find_workload(scene.workload, num_requests=round(scene.size * num_requests))


def rate_of(scene: Scene, workload: Workload) -> float:
    """Requests that arrive in a second of a scene."""
    return rate_at(scene.load, workload, scene.engine) if scene.load < inf else inf


def measured(part: Part) -> dict[str, Pair]:
    """Each policy's figures next to those of fcfs."""
    workload = workload_of(part.scene, part.num_requests)
    base = _run(BASE, part, workload)
    base_window = period_of(base)
    found = {}
    for policy in part.policies:
        ours = base if policy == BASE else _run(policy, part, workload)
        mine = period_of(ours)
        mine, theirs = mine.joined(base_window), base_window.joined(mine)
        found[policy] = Pair(
            values(ours, mine, part.scene),
            values(base, theirs, part.scene),
            mine.state == OVERLOADED,
        )
    return found


def _run(policy: str, part: Part, workload: Workload) -> Run:
    return run(policy, workload, part.scene.engine, seed=part.seed, rate=part.rate)


def values(of: Run, period: Window, scene: Scene) -> Values:
    """The figures that a scene shows."""
    found = figures(of, period=period)
    known = found.values() | own_figures(of, found)
    return {name: known.get(name, nan) for name in ("kv_peak", *SHOWN, *scene.figures)}


def own_figures(of: Run, found: Figures) -> Values:
    """Figures that only this page has.

    ``ttft of USER``: mean. ``readers``: the share of requests whose reader, who wants a first token
    in a second and then takes five a second, has the last in time. ``programs``: seconds that a
    program waited for answers, for each output token of it; mean over programs.
    """
    requests = of.requests
    came = np.zeros(len(requests), dtype=np.bool_)
    came[found.window.num_warmup :] = True
    due = READER_TTFT + READER_TBT * (requests.counts("num_output") - 1)
    in_time = (ttft(requests) <= READER_TTFT) & (e2e(requests) <= due)
    own = {"readers": float((in_time & requests.done)[came].mean())}
    if found.service is not None:
        own |= {f"ttft of {user.name}": user.ttft for user in found.service.users}
    if not found.is_overloaded:
        own["programs"] = _by_program(of, came)
    return own


def _by_program(of: Run, came: np.ndarray[Any, Any]) -> float:
    """Mean over the programs all of whose requests came in the period."""
    columns = (of.requests.text("program"), e2e(of.requests), of.requests.counts("num_output"))
    programs, seconds, tokens = columns
    names, places = np.unique(programs.astype(str), return_inverse=True)
    totals = [np.bincount(places, weights) for weights in (seconds, tokens, ~came)]
    whole = (names != "") & (totals[2] == 0)
    return float((totals[0] / totals[1])[whole].mean()) if whole.any() else nan


def heads_of(scenes: Mapping[str, Scene], num_requests: int) -> dict[str, Any]:
    """By name, what each scene is, in words and numbers."""
    heads = {}
    for name, scene in scenes.items():
        workload = workload_of(scene, num_requests)
        heads[name] = described(scene, workload, rate_of(scene, workload))
    return heads


def simulate(
    heads: Mapping[str, Any],
    policies: Mapping[str, tuple[str, ...]],
    num_requests: int,
    seeds: range,
    jobs: int = 1,
) -> Iterator[Kept]:
    """The figures of each scene's policies in the form of the kept file, one seed after the other.

    heads: by scene, see ``heads_of``; its rate is that of the arrivals.
    """
    rates = {name: inf if head["rate"] is None else head["rate"] for name, head in heads.items()}
    parts = [
        Part(SCENES[name], policies[name], num_requests, rate, seed)
        for seed in seeds
        for name, rate in rates.items()
    ]
    results = iter(in_processes(measured, parts, jobs))
    for _ in seeds:
        found = zip(heads.items(), islice(results, len(heads)), strict=True)
        scenes = {
            name: {**head, "policies": {policy: kept(pair) for policy, pair in pairs.items()}}
            for (name, head), pairs in found
        }
        yield {"format": FORMAT, "requests": num_requests, "seeds": 1, "scenes": scenes}


def kept(pair: Pair) -> dict[str, Any]:
    return {
        "overloaded": int(pair.is_overloaded),
        "figures": {
            name: [[rounded(value), rounded(pair.theirs[name])]]
            for name, value in pair.ours.items()
        },
    }


def described(scene: Scene, workload: Workload, rate: float) -> dict[str, Any]:
    """What a scene was, in words and numbers."""
    return {
        "workload": str(workload),
        "engine": engine_line(scene.engine, workload)
        + ("" if scene.engine.enable_prefix_caching else "; no prefix cache"),
        "cost": cost_line(scene.engine),
        "load": None if scene.load == inf else scene.load,
        "rate": None if rate == inf else float(f"{rate:.6g}"),
        "requests": workload.num_requests,
    }


def rounded(value: float) -> float | None:
    return None if isnan(value) else float(f"{value:.{DIGITS}g}")


def outcome(policy: dict[str, Any], figure: str) -> Outcome | None:
    """A policy's figure, or ``None`` where too few seeds have it."""
    both = policy["figures"].get(figure, [])
    pairs = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]
    if not pairs or len(pairs) < MIN_SEEDS * len(both):
        return None
    is_ratio = is_relative(figure) and all(min(pair) > 0.0 for pair in pairs)
    by_seed = [log(ours / theirs) if is_ratio else ours - theirs for ours, theirs in pairs]
    by = mean_over(by_seed)
    if is_ratio:
        by = Estimate(*map(expm1, by))
    return Outcome(
        ours=sum(ours for ours, _ in pairs) / len(pairs),
        theirs=sum(theirs for _, theirs in pairs) / len(pairs),
        by=by,
        is_ratio=is_ratio,
        is_equal=all(ours == theirs for ours, theirs in pairs),
        chance=chance(by_seed),
    )


def is_relative(figure: str) -> bool:
    """Whether differences of it are given as a part of it; those of a share are not."""
    return figure not in SHARES


def policies_of(kept: Kept) -> list[str]:
    """Policies of which there are figures, in the order of the page."""
    return sorted({name for scene in kept["scenes"].values() for name in scene["policies"]})


def with_seeds(old: Kept, new: Kept) -> Kept:
    """The figures of two groups of seeds together."""
    check_same_scenes(old, new)
    scenes = {}
    for name, scene in old["scenes"].items():
        added = new["scenes"][name]["policies"]
        if scene["policies"].keys() != added.keys():
            raise SystemExit("the kept figures are of other policies: measure all afresh")
        both = {policy: _joined(had, added[policy]) for policy, had in scene["policies"].items()}
        scenes[name] = {**scene, "policies": both}
    return {**old, "seeds": old["seeds"] + new["seeds"], "scenes": scenes}


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    figures = {name: values + new["figures"][name] for name, values in old["figures"].items()}
    return {"overloaded": old["overloaded"] + new["overloaded"], "figures": figures}


def with_policies(old: Kept, new: Kept) -> Kept:
    """Kept figures, and in the place of their own those of policies that were measured anew."""
    check_same_scenes(old, new)
    if old["seeds"] != new["seeds"]:
        raise SystemExit(f"{new['seeds']} seeds were measured, {old['seeds']} are kept")
    scenes = {
        name: {**scene, "policies": {**scene["policies"], **new["scenes"][name]["policies"]}}
        for name, scene in old["scenes"].items()
    }
    return {**old, "scenes": scenes}


def with_scenes(old: Kept, new: Kept) -> Kept:
    """Kept figures, and those of scenes that were measured anew, in the place of their own."""
    if (old["requests"], old["seeds"]) != (new["requests"], new["seeds"]):
        raise SystemExit("the kept figures are of other requests or seeds: measure all afresh")
    return {**old, "scenes": {**old["scenes"], **new["scenes"]}}


def check_same_scenes(old: Kept, new: Kept) -> None:
    """Raise ``SystemExit`` unless both are of the same scenes."""

    def heads(of: Kept) -> Any:
        scenes = of["scenes"].items()
        return of["format"], of["requests"], [(n, {**s, "policies": 0}) for n, s in scenes]

    if heads(old) != heads(new):
        raise SystemExit("the kept figures are of other scenes or requests: measure all afresh")


def read(path: Path) -> Kept:
    found: Kept = json.loads(path.read_text(encoding="utf-8"))
    return found


def written(kept: Kept) -> str:
    """JSON with a line for each figure of a policy, so that changes can be read."""
    return "".join(_lines(kept, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
    if not isinstance(value, dict):
        yield json.dumps(value)
        return
    pad = " " * (depth + 1)
    yield "{"
    for place, (key, inner) in enumerate(value.items()):
        yield f"{',' if place else ''}\n{pad}{json.dumps(key)}: "
        yield from _lines(inner, depth + 1)
    yield f"\n{pad[:-1]}}}"
