"""Prove a policy: check random engines and workloads against every invariant."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache, partial
from itertools import count, islice
from math import inf
from os import cpu_count
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine.config.cli import json_object
from engine.errors import ConfigError, PolicyError
from engine.ipc.pool import workers
from engine.sched.plugins.find import find_policy
from policylab.sim.compare import Experiment, compare
from policylab.sim.figures import MAX_RECOMPUTED, MIN_THROUGHPUT, Figures
from policylab.sim.run import Engine, PolicyVariant
from policylab.sim.workloads import find_workload
from policylab.simulated import SimulatedHalves
from policylab.verify.case import Add, Case
from policylab.verify.shrink import Clocked
from policylab.verify.swarm import (
    FoundCase,
    Report,
    Swarm,
    keep,
    replay_corpus,
    reproduction,
    smallest,
)
from policylab.verify.trials import MIN_THROUGHPUT as MIN_THROUGHPUT_OF_ANY
from policylab.verify.trials import TrialFailure, Trials, run_trials, statements

BATCH = 20  # seeds per task of a process
VIOLATION = 1
LEAST_RUNS = 100  # engines that run even if time is up: the machine may be slow
MAX_LOST = 0.5  # share of computed tokens: a policy that recomputes more fails
SHRINK_SECONDS = 20.0
MAX_WAIT = 1000

# The load that shows how much a policy recomputes: long enough for a backlog, and with learned
# output lengths, without which policies that use them behave like fcfs.
STANDARD_LOAD = 0.9
STANDARD_REQUESTS = 1000
STANDARD_PREDICTOR = "history"


@cache
def halves() -> SimulatedHalves:
    """The grammars and other scheduler features of simulated engines, shared by all engines of this
    process so that grammars are compiled once."""
    return SimulatedHalves()


class VerifyHunt(NamedTuple):
    """What to verify: a policy (``None``: a random one for each seed) and its options. The whole
    state is checked after every ``every``-th step."""

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
        help="name of a shipped or installed policy, or the dotted path of a class; "
        "default: each seed draws a shipped one",
    )
    group.add_argument(
        "--policy-options",
        type=json_object,
        metavar="JSON",
        help="arguments of its constructor; default: drawn around its defaults",
    )
    group.add_argument(
        "--seconds",
        type=float,
        metavar="T",
        help="stop searching after this time even if --steps is not reached, but not before "
        f"{LEAST_RUNS} engines; shrinking a found case (see --shrink-seconds) and the "
        "trials of --policy take some more seconds",
    )
    group.add_argument(
        "--shrink-seconds",
        type=float,
        default=SHRINK_SECONDS,
        metavar="T",
        help="how long to shrink a case that breaks a rule; the smallest one found is printed "
        f"(default: {SHRINK_SECONDS:g})",
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
        help="file of cases that once broke a rule: they run first, and new ones are added",
    )
    _add_trials(group)


def _add_trials(group: argparse._ArgumentGroup) -> None:
    """Add the options that only apply to a policy named by --policy."""
    group.add_argument(
        "--max-wait",
        type=int,
        default=MAX_WAIT,
        metavar="N",
        help="with --policy: steps within which a request must be served while better ones keep "
        f"arriving; 0: requests may starve (default: {MAX_WAIT})",
    )
    group.add_argument(
        "--length-predictor",
        metavar="NAME",
        help="with --policy: a length predictor, which must predict 0 or more tokens "
        f"(default: {STANDARD_PREDICTOR})",
    )
    group.add_argument(
        "--no-load",
        dest="has_load",
        action="store_false",
        help="with --policy: do not simulate a standard load, which takes a few seconds and shows "
        "how many tokens the policy recomputes",
    )


def run(parsed: argparse.Namespace) -> int:
    _check(parsed)
    logging.getLogger("engine").setLevel(logging.CRITICAL)  # refusals and faults are expected
    hunt = VerifyHunt(parsed.policy, parsed.policy_options, parsed.every)
    console = Console()
    begun = time.monotonic()
    report = Report() if hunt.policy is not None else replay_corpus(hunt.swarm())
    if parsed.corpus is not None:
        report.add(replay_corpus(hunt.swarm(), parsed.corpus))
    if not report.found:
        _search(hunt, parsed, report, console)
    _print_summary(console, report, time.monotonic() - begun)
    for found in report.found[:1]:
        clocked = Clocked(parsed.shrink_seconds, _tell_shrinking(found, parsed.shrink_seconds))
        small = _shrink(found, clocked)
        _print_violation(console, found, small)
        if clocked.is_over:
            print(
                f"(shrinking stopped after {parsed.shrink_seconds:g} s; for a smaller case raise "
                "--shrink-seconds)"
            )
        if parsed.corpus is not None and found.seed >= 0:
            keep(found, small, parsed.corpus)
    if report.found:
        return VIOLATION
    return 0 if hunt.policy is None else _try_policy(hunt, parsed, console)


def _check(parsed: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that cannot be combined or cannot work."""
    limits = {"steps": (1, inf), "every": (1, inf), "seed": (0, inf), "jobs": (1, cpu_count() or 1)}
    limits |= {"max_wait": (0, inf)}
    for name, (low, high) in limits.items():
        value = getattr(parsed, name)
        if not low <= value <= high:
            name = name.replace("_", "-")
            limit = f"at least {low}" if high == inf else f"in {low}..{high}, the number of cores"
            raise ConfigError(f"--{name} is {value}, must be {limit}")
    if parsed.seconds is not None and not parsed.seconds > 0:
        raise ConfigError(f"--seconds is {parsed.seconds}, must be above 0")
    if not parsed.shrink_seconds >= 0:
        raise ConfigError(f"--shrink-seconds is {parsed.shrink_seconds}, must be at least 0")
    if parsed.corpus is not None:
        try:  # now, rather than after hours when a case is written
            parsed.corpus.open("a").close()
        except OSError as error:
            raise ConfigError(f"--corpus {parsed.corpus} cannot be written: {error}") from error
    if not __debug__:
        raise ConfigError("python -O removes the assertions that check; run without -O")
    if parsed.policy is not None:
        find_policy(parsed.policy, parsed.policy_options or {})
    elif parsed.policy_options is not None:
        raise ConfigError("--policy-options needs --policy; name the policy or leave it out")


def _search(hunt: VerifyHunt, parsed: argparse.Namespace, report: Report, console: Console) -> None:
    """Run seeds until enough steps were planned, time is up or a rule is broken; fills `report`."""
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
            is_late = is_late and report.num_runs >= LEAST_RUNS
            if report.found or is_late or report.num_steps >= parsed.steps:
                break


def _batches(hunt: VerifyHunt, parsed: argparse.Namespace) -> Iterator[Report]:
    """Run batches of seeds without end, and yield the report of each batch."""
    seeds = count(parsed.seed)
    if parsed.jobs == 1:
        while True:
            yield _run_batch(hunt, list(islice(seeds, BATCH)))
    with workers(parsed.jobs) as pool:
        waiting: set[Future[Report]] = set()
        while True:
            while len(waiting) < 2 * parsed.jobs:
                waiting.add(pool.submit(_run_batch, hunt, list(islice(seeds, BATCH))))
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def _run_batch(hunt: VerifyHunt, seeds: list[int]) -> Report:
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
        f"accepted draft tokens: {report.num_drafts_right:,}; texts that followed a grammar to "
        f"its end: {report.num_followed:,}; adapters loaded into slots: {report.num_loads:,}, "
        f"that could not be read: {report.num_failed_loads:,}; media items encoded: "
        f"{report.num_encoded:,}, that could not be: {report.num_failed_media:,}",
        highlight=False,
        soft_wrap=True,
    )
    if report.num_runs and not report.num_requests and not report.found:
        console.print("warning: all requests were refused, so nothing else was tested")
    by_policy = ", ".join(f"{name} {n:,}" for name, n in sorted(report.steps_by_policy.items()))
    console.print(f"steps by policy: {by_policy}", highlight=False, soft_wrap=True)
    by_windows = ", ".join(
        f"{'+'.join(str(window or 'full') for window in windows)} {n:,}"
        for windows, n in sorted(report.steps_by_windows.items())
    )
    console.print(f"steps by windows of KV groups: {by_windows}", highlight=False, soft_wrap=True)


def _print_violation(console: Console, found: FoundCase, small: Case) -> None:
    """Print the broken rule and a program that repeats the smallest case that breaks it."""
    source = "a kept case" if found.seed < 0 else f"seed {found.seed}"
    console.print(f"\nviolation ({source}, {found.broken.place}):", style="bold red")
    console.print(found.broken.message, highlight=False, markup=False, soft_wrap=True)
    console.print("\nthe smallest case found that breaks the rule:\n", highlight=False)
    console.out(reproduction(small), highlight=False)


def _shrink(found: FoundCase, clocked: Clocked) -> Case:
    """Make the failing case smaller until time is up or the user interrupts. Returns the smallest
    case found."""
    try:
        return smallest(found, halves=halves(), goes_on=clocked)
    except KeyboardInterrupt:
        clocked.is_over = True
        return clocked.best or found.case


def _tell_shrinking(found: FoundCase, limit: float) -> Callable[[int, Case, float], None]:
    """Returns a callback that prints the progress of shrinking to stderr; stdout is for results."""
    before = _num_requests(found.case)

    def tell(num_tries: int, best: Case, seconds: float) -> None:
        print(
            f"shrinking the case: {num_tries} tries, {_num_requests(best)} of {before} "
            f"requests left, {seconds:.0f} of {limit:g} s",
            file=sys.stderr,
            flush=True,
        )

    return tell


def _num_requests(case: Case) -> int:
    return sum(isinstance(event, Add) for event in case.events)


def _try_policy(hunt: VerifyHunt, parsed: argparse.Namespace, console: Console) -> int:
    """Run the trials and the standard load for a policy that broke no rule in the search. Returns
    the exit status."""
    # A policy that starves requests or serves few gets no load, where thousands would wait.
    print_plain = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    trials = run_trials(
        hunt.policy,
        hunt.options,
        max_wait=parsed.max_wait or None,
        predictor=parsed.length_predictor,
        goes_on=Clocked(parsed.shrink_seconds),
    )
    for line in (*(f"by design: {each}" for each in trials.by_design), *trials.not_shown):
        print_plain(line)
    failures = trials.failures
    if not failures:
        print_plain(*_passed(trials), sep="\n")
    if parsed.has_load and not any(each.is_rule or each.excuse for each in failures):
        lines, more = _on_load(hunt)
        print_plain(*lines, sep="\n")
        failures = [*failures, *more]
    for failure in failures:
        console.print("\nfailure:", style="bold red")
        print_plain(failure.message)
        if failure.program:
            print_plain("\nthe smallest case found that shows the failure:\n")
            console.out(failure.program, highlight=False)
    return VIOLATION if failures else 0


def _passed(trials: Trials) -> Iterator[str]:
    """Yields lines about what was checked and holds."""
    waited = None if trials.waited is None else trials.waited.num_steps
    longest = "" if waited is None else f"; the request that waited longest ended in step {waited}"
    yield "passed: all invariants of plans, outputs, blocks and queues, and these trials:"
    yield f"  overload: better-ranked requests keep arriving{longest}"
    yield "  crowds: equal shares of users, throughput, hooks, predictions"
    yield "  memory: many small requests come and go"
    yield "  repetition: the same plans next to a second engine and in other processes"


def _on_load(hunt: VerifyHunt) -> tuple[list[str], list[TrialFailure]]:
    """Serve the standard load with the policy and with fcfs. Returns (lines to print, failures)."""
    name, load = str(hunt.policy), f"{STANDARD_REQUESTS} requests at load {STANDARD_LOAD}"
    try:
        fcfs, figures = next_to_fcfs(hunt.policy, hunt.options)
    except (ConfigError, PolicyError) as error:  # the policy has no figures of its own
        return [], [TrialFailure(f"{name}: on a standard load ({load}): {error}")]
    share = figures.recomputed
    throughput = figures.tokens_per_second / fcfs.tokens_per_second
    recomputes = f"recomputes {100 * share:.1f} % of its tokens"
    serves = f"serves {throughput:.2f} of fcfs's throughput"
    refused = f"; it refused {figures.num_refused} requests" if figures.num_refused else ""
    lines = [f"standard load ({load}): {name} {recomputes} and {serves}{refused}"]
    stated = statements(find_policy(hunt.policy, hunt.options or {}))
    failures = []
    if throughput < MIN_THROUGHPUT_OF_ANY and "throughput" not in stated:
        failures.append(f"{serves} (below {MIN_THROUGHPUT_OF_ANY}){refused}")
    if share > MAX_LOST and "recomputing" not in stated:
        failures.append(f"{recomputes} (above {100 * MAX_LOST:.0f} %)")
    bad = []
    if share > MAX_RECOMPUTED:
        bad.append(f"{recomputes} (above {100 * MAX_RECOMPUTED:.0f} %)")
    if throughput < MIN_THROUGHPUT:
        bad.append(f"{serves} (below {MIN_THROUGHPUT})")
    if bad and not failures:
        warned = f"it {' and '.join(bad)}{refused}"
        lines.append(f"warning: {name} collapses on a standard load: {warned}")
    return lines, [TrialFailure(f"{name}: on a standard load, {each}") for each in failures]


def next_to_fcfs(policy: Any, options: dict[str, Any] | None) -> tuple[Figures, Figures]:
    """Serve the standard load with fcfs and with ``policy``. Returns the figures of fcfs, then
    those of ``policy``.

    Raises ``PolicyError`` if a policy computed nothing for a quarter of an hour or if some of its
    answers were replaced by defaults.
    """
    [cell] = compare(
        Experiment(
            policies=["fcfs", PolicyVariant(policy, options) if options else policy],
            workload=find_workload("log-uniform", num_requests=STANDARD_REQUESTS),
            engine=Engine(length_predictor=STANDARD_PREDICTOR),
            loads=[STANDARD_LOAD],
        )
    )
    for name, why in cell.left_out.items():
        raise PolicyError(f"{name} has no figures: {why}")
    [fcfs], [figures] = cell.figures
    return fcfs, figures
