"""Prove a policy: random engines and workloads against every invariant, for as long as you like."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from itertools import count, islice
from math import inf
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine.config.cli import json_object
from engine.core.simulated import SimulatedHalves
from engine.errors import ConfigError
from engine.sched.plugins.find import find_policy
from engine.verify.case import Case
from engine.verify.swarm import (
    Found,
    Report,
    Swarm,
    keep,
    replay_corpus,
    reproduction,
    smallest,
)

BATCH = 20  # seeds that a process is given at a time
VIOLATION = 1


@cache
def halves() -> SimulatedHalves:
    """Drafts and grammars of all engines of this process, for which texts are compiled once."""
    return SimulatedHalves()


class Hunt(NamedTuple):
    """What to look for, and how closely."""

    policy: str | None
    options: dict[str, Any] | None
    every: int

    def swarm(self) -> Swarm:
        return Swarm(self.policy, self.options, every=self.every, halves=halves())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--steps", type=int, default=200_000, metavar="N", help="steps to plan (default: 200000)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="S", help="the first seed")
    group.add_argument(
        "--policy",
        metavar="NAME",
        help="a shipped policy, an installed one, or the dotted path of your own class; "
        "without it every seed draws a shipped one",
    )
    group.add_argument(
        "--policy-options",
        type=json_object,
        metavar="JSON",
        help="arguments of its constructor; drawn around its defaults if not given",
    )
    group.add_argument(
        "--seconds", type=float, metavar="T", help="stop after this time, whatever --steps says"
    )
    group.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    group.add_argument(
        "--every",
        type=int,
        default=8,
        metavar="K",
        help="check the whole state after every K-th step; plans, outputs and block tables are "
        "checked after each (default: 8)",
    )
    group.add_argument(
        "--corpus",
        type=Path,
        metavar="FILE",
        help="cases that once broke a rule: they are run first, and what is found is added",
    )


def run(parsed: argparse.Namespace) -> int:
    _check(parsed)
    logging.getLogger("engine").setLevel(logging.CRITICAL)  # refusals and faults are expected
    hunt = Hunt(parsed.policy, parsed.policy_options, parsed.every)
    console = Console()
    begun = time.monotonic()
    report = Report() if hunt.policy is not None else replay_corpus(hunt.swarm())
    if parsed.corpus is not None:
        report.add(replay_corpus(hunt.swarm(), parsed.corpus))
    if not report.found:
        _search(hunt, parsed, report, console)
    _print_summary(console, report, time.monotonic() - begun)
    for found in report.found[:1]:
        small = smallest(found, halves=halves())
        _print_violation(console, found, small)
        if parsed.corpus is not None and found.seed >= 0:
            keep(found, small, parsed.corpus)
    return VIOLATION if report.found else 0


def _check(parsed: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that cannot work."""
    limits = {"steps": (1, inf), "every": (1, inf), "seed": (0, inf), "jobs": (1, cpu_count() or 1)}
    for name, (low, high) in limits.items():
        value = getattr(parsed, name)
        if not low <= value <= high:
            limit = f"at least {low}" if high == inf else f"in {low}..{high}, the cores there are"
            raise ConfigError(f"--{name} is {value}, must be {limit}")
    if parsed.seconds is not None and not parsed.seconds > 0:
        raise ConfigError(f"--seconds is {parsed.seconds}, must be above 0")
    if parsed.corpus is not None:
        try:  # now, not after hours when a case is to be written
            parsed.corpus.open("a").close()
        except OSError as error:
            raise ConfigError(f"--corpus {parsed.corpus} cannot be written: {error}") from error
    if not __debug__:
        raise ConfigError("python -O leaves assertions out, and nothing would be checked")
    if parsed.policy is not None:
        find_policy(parsed.policy, parsed.policy_options or {})
    elif parsed.policy_options is not None:
        raise ConfigError("--policy-options are for the policy that --policy names, and none is")


def _search(hunt: Hunt, parsed: argparse.Namespace, report: Report, console: Console) -> None:
    """Seeds from the first on, until there were enough steps, time is up or a rule is broken."""
    columns = (
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"),
        TextColumn("{task.fields[rate]:,.0f} a second"),
        TimeElapsedColumn(),
    )
    begun = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=parsed.steps, rate=0.0)
        for part in _batches(hunt, parsed):
            report.add(part)
            seconds = time.monotonic() - begun
            progress.update(task, completed=report.num_steps, rate=report.num_steps / seconds)
            is_late = parsed.seconds is not None and seconds >= parsed.seconds
            if report.found or is_late or report.num_steps >= parsed.steps:
                break


def _batches(hunt: Hunt, parsed: argparse.Namespace) -> Iterator[Report]:
    """What each batch of seeds brought."""
    seeds = count(parsed.seed)
    if parsed.jobs == 1:
        while True:
            yield _run_batch(hunt, list(islice(seeds, BATCH)))
    with ProcessPoolExecutor(parsed.jobs, mp_context=get_context("spawn")) as pool:
        waiting: set[Future[Report]] = set()
        try:
            while True:
                while len(waiting) < 2 * parsed.jobs:
                    waiting.add(pool.submit(_run_batch, hunt, list(islice(seeds, BATCH))))
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run_batch(hunt: Hunt, seeds: list[int]) -> Report:
    logging.getLogger("engine").setLevel(logging.CRITICAL)
    return hunt.swarm().run(seeds, num_steps=2**62)


def _print_summary(console: Console, report: Report, seconds: float) -> None:
    rate = report.num_steps / seconds if seconds else 0.0
    console.print(
        f"{report.num_steps:,} steps, {report.num_runs:,} engines, {report.num_requests:,} "
        f"requests in {seconds:.1f} s ({rate:,.0f} steps/s); violations: {len(report.found)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"drafts that were right: {report.num_drafts_right:,}; texts that followed a grammar to "
        f"its end: {report.num_followed:,}",
        highlight=False,
        soft_wrap=True,
    )
    by_policy = ", ".join(f"{name} {n:,}" for name, n in sorted(report.steps_by_policy.items()))
    console.print(f"steps by policy: {by_policy}", highlight=False, soft_wrap=True)


def _print_violation(console: Console, found: Found, small: Case) -> None:
    """What broke, and the smallest program that breaks it."""
    source = "a kept case" if found.seed < 0 else f"seed {found.seed}"
    console.print(f"\nviolation ({source}, {found.broken.place}):", style="bold red")
    console.print(found.broken.message, highlight=False, markup=False, soft_wrap=True)
    console.print("\nthe smallest case found that breaks it:\n", highlight=False)
    console.out(reproduction(small), highlight=False)
