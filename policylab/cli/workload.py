"""Describe a workload, and write its requests to a file.

A workload is named with options, as in ``"azure-conv(num_requests=5000,num_users=50)"``; --list
prints all names. The same seed gives the same requests. A file that --out wrote is itself a
workload: ``requests.jsonl``, or with options ``"jsonl(path='requests.jsonl',num_users=5)"``.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable
from dataclasses import MISSING, fields
from math import isfinite
from pathlib import Path

from engine.errors import ConfigError
from policylab.cli import lab
from policylab.sim.workloads import WORKLOADS, Workload, find_workload
from policylab.sim.workloads.describe import Description, JobGroup, as_if_served
from policylab.sim.workloads.jsonl import FORMAT, Head, write

LENGTHS = ("mean", "P5", "P25", "P50", "P75", "P90", "P95", "P99", "longest")
GROUPS = ("requests", "share", "prompt tokens", "output tokens", "deadline", "promise", "priority")
MOST_SHOWN = 10
MANY_PRIORITIES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        nargs="?",
        metavar="W",
        help="its name, optionally with options, as in 'azure-conv(num_requests=5000)', or a file: "
        "a step log, a trace, what --out wrote",
    )
    parser.add_argument("--list", action="store_true", help="list all kinds and their options")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="requests per second; default: the workload's rate"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the requests here (JSONL)")
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="block size in tokens for counting prefix reuse; default: 16, for Mooncake 512",
    )


def run(parsed: argparse.Namespace) -> int:
    if parsed.list:
        print(*listed(), sep="\n")
        return 0
    if parsed.workload is None:
        raise ConfigError("no workload is named; name one, such as azure-conv, or use --list")
    if parsed.rate is not None and not parsed.rate > 0:
        raise ConfigError(f"--rate is {parsed.rate:g}, must be above 0")
    workload = find_workload(parsed.workload)
    block_size = workload.block_size if parsed.block_size is None else parsed.block_size
    if block_size < 1:
        raise ConfigError(f"--block-size is {block_size}, must be 1 or more")
    description = Description(block_size)
    source = workload.source(parsed.seed, parsed.rate)
    description.has_followers = source.has_followers
    jobs = description.watch(as_if_served(source))
    if parsed.out is None:
        deque(jobs, maxlen=0)
    else:
        head = Head(FORMAT, str(workload), parsed.seed, parsed.rate)
        write(parsed.out, head, jobs)
    print(*described(workload, parsed.seed, description), sep="\n")
    return 0


def listed() -> Iterable[str]:
    """Yields lines with the name, the summary and the options of each kind of workload."""
    common = {option.name: option.default for option in fields(Workload)}
    for name, kind in sorted(WORKLOADS.items()):
        yield f"{name:20}{_summary(kind)}"
        own = [
            option.name if option.default is MISSING else f"{option.name}={option.default!r}"
            for option in fields(kind)
            if option.name != "num_requests" and common.get(option.name, ...) != option.default
        ]
        yield f"{'':20}{', '.join(own)}"
    shared = (f"{option.name}={option.default!r}" for option in fields(Workload))
    yield f"{'all of them':20}{', '.join(shared)}"


def _summary(kind: type[Workload]) -> str:
    """Returns the first sentence of the kind's docstring."""
    return " ".join((kind.__doc__ or "").split()).partition(". ")[0].rstrip(".")


def described(workload: Workload, seed: int, found: Description) -> Iterable[str]:
    """Yields the figures of a workload, line by line."""
    yield f"{workload}, seed {seed}"
    rate = f"{found.rate:.3g} per second" if isfinite(found.rate) else "all at once"
    yield f"{found.num_requests} requests in {found.seconds:.1f} s: {rate}"
    if found.has_followers:
        yield "some requests follow others, assumed to get 50 tokens per second after 0.5 s"
    yield (
        f"gaps: CV {_figure(found.gap_cv)}; dispersion of counts {_figure(found.dispersion(1.0))} "
        f"per second, {_figure(found.dispersion(60.0))} per minute"
    )
    reuse = found.reuse
    yield (
        f"prefix reuse: an infinite cache has {100 * reuse.share:.1f} % of prompt tokens in blocks "
        f"of {reuse.block_size}"
    )
    if found.programs:
        number = len(found.programs)
        yield f"programs: {number}, with {sum(found.programs.values()) / number:.2f} requests each"
    yield ""
    rows = [(name, *map(_figure, row)) for name, row in found.lengths().items()]
    yield from _aligned([("tokens", *LENGTHS), *rows])
    tables = {"tier": found.tiers, "user": found.users, "adapter": found.adapters}
    for name, groups in tables.items():
        if groups.keys() - {""}:
            yield ""
            yield from _aligned(_table(name, groups))


def _figure(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _table(name: str, groups: dict[str, JobGroup]) -> list[tuple[str, ...]]:
    """Returns table rows of the largest groups of requests. ``name``: what they are grouped by."""
    whole = sum(group.num_requests for group in groups.values())
    largest = sorted(groups.items(), key=lambda item: (-item[1].num_requests, item[0]))
    rows: list[tuple[str, ...]] = [(name, *GROUPS)]
    for key, group in largest[:MOST_SHOWN]:
        number = group.num_requests
        levels = sorted(group.priorities)
        many = f"{levels[0]} to {levels[-1]}"
        rows.append(
            (
                key or "(none)",
                str(number),
                f"{100 * number / whole:.1f} %",
                _figure(group.num_prompt / number),
                _figure(group.num_output / number),
                f"{100 * group.with_deadline / number:.0f} %",
                f"{100 * group.with_promise / number:.0f} %",
                ", ".join(map(str, levels)) if len(levels) < MANY_PRIORITIES else many,
            )
        )
    if rest := largest[MOST_SHOWN:]:
        number = sum(group.num_requests for _, group in rest)
        cells = (f"{len(rest)} more", str(number), f"{100 * number / whole:.1f} %")
        rows.append((*cells, *[""] * (len(GROUPS) - 2)))
    return rows


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    return (line.rstrip() for line in lab.aligned(rows))
