"""``metronome compare A B --worst``: the workload and engine on which A is worst relative to B."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from math import inf
from typing import Any

from engine.errors import ConfigError
from policylab.cli import lab
from policylab.sim.compare import Experiment, compare
from policylab.sim.experiment import in_processes
from policylab.sim.figures import NAMES
from policylab.sim.named import call, split
from policylab.sim.promises import slo
from policylab.sim.run import Engine, check, name_of
from policylab.sim.workloads import Workload
from policylab.sim.worst import KNOBS, LOAD, Found, Hunt, WorstCase, choice, find_worst, rate_of

NUM_REQUESTS = 100  # in a case by default: many short cases show more than few long ones
NUM_SEEDS = 2
NUM_OTHERS = 5  # fresh seeds for the case that was found: the search is biased to its own
CONFLICTS = {
    "rate": "the search sets the load",
    "sweep": "the search sets the options",
    "unpaired": "both policies get the same requests",
    "capacity": "they search for different things",
    "figures": "the search uses one --figure",
    "json": "it prints a command line",
    "csv": "it prints a command line",
    "report": "it prints a command line, whose run can be looked at",
    "plots": "it prints a command line, whose run can be looked at",
}
ENGINE_FLAGS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "num_blocks": "--num-kv-blocks",
    "block_size": "--block-size",
    "depth": "--depth",
    "length_predictor": "--length-predictor",
    "snapshot_blocks": "--snapshot-blocks",
    "snapshot_policy": "--snapshot-policy",
}
TYPED = {"profile": "--profile", "cost": "--cost", "max_model_len": "--max-model-len"}
PINS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "num_kv_blocks": "num_blocks",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "shared_prefix": "shared_prefix",
    "users": "num_users",
    "loads": LOAD,
}
"""By the name of a command-line option: the knob that the search leaves unchanged if the option is
set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the worst case")
    group.add_argument(
        "--worst",
        nargs="?",
        const="",
        metavar="A,B",
        help="search for the workload and engine on which policy A is worst relative to B; options "
        "that are given stay fixed",
    )
    group.add_argument(
        "--figure", default="ttft.mean", metavar="NAME", help="the figure; default: %(default)s"
    )
    group.add_argument(
        "--seconds", type=float, default=60.0, metavar="T", help="search time; default: 60"
    )


def run(parsed: argparse.Namespace, policies: list[Any], loads: list[float]) -> int:
    """Run ``compare A B --worst`` or ``compare --worst A,B``. Returns the exit status."""
    if parsed.worst:
        parsed.policies += split(parsed.worst)
        policies = [*policies, *lab.variants(parsed.worst, "--worst")]
    start = _start(parsed, policies, loads)
    hunts = [
        Hunt(
            policy=policies[0],
            other=policies[1],
            figure=parsed.figure,
            start=start,
            slo=tuple(slo(parsed.slo)) if parsed.slo else (),
            pinned=_pinned(parsed),
            seed=parsed.seed + place,
            seconds=parsed.seconds,
        )
        for place in range(max(1, parsed.jobs))
    ]
    found = list(in_processes(find_worst, hunts, parsed.jobs))
    worst = max(found, key=lambda each: each.score.worse)
    print(*described(parsed, hunts[0], worst, sum(each.num_tries for each in found)), sep="\n")
    return 1 if worst.score.why else 0


def _start(parsed: argparse.Namespace, policies: list[Any], loads: list[float]) -> WorstCase:
    """Returns the case at which the search starts. Raises ``ConfigError`` for options that cannot
    work."""
    if len(policies) != 2:
        raise ConfigError(
            f"--worst needs two policies, got {len(policies)}; give them as in vtc,fcfs, where the "
            "second is the baseline"
        )
    for name, why in CONFLICTS.items():
        if getattr(parsed, name):
            raise ConfigError(f"--worst and --{name} cannot be combined: {why}; leave one out")
    if parsed.figure not in NAMES:
        raise ConfigError(f"figure {parsed.figure!r} is not known; there are: {', '.join(NAMES)}")
    if not 0 < parsed.seconds < inf:
        raise ConfigError(f"--seconds is {parsed.seconds:g}, must be above 0")
    if len(loads) > 1:
        raise ConfigError(f"--loads has {len(loads)} loads, must have at most one with --worst")
    if parsed.requests is None:
        parsed.requests = NUM_REQUESTS
    workload = lab.workload_of(parsed)
    engine = lab.engine_of(parsed, lab.log_of(workload))
    check(policies, workload, engine)
    load = loads[0] if loads else None if workload.natural_rate is None else lab.LOAD
    seeds = tuple(range(parsed.seed, parsed.seed + NUM_SEEDS))
    return WorstCase(workload=workload, engine=engine, load=load, seeds=seeds)


def _pinned(parsed: argparse.Namespace) -> frozenset[str]:
    """Returns the options that the command line sets and the search must leave unchanged."""
    given = {knob for name, knob in PINS.items() if getattr(parsed, name) is not None}
    return frozenset(given | call(parsed.workload, "--workload", "log-uniform")[1].keys())


def described(
    parsed: argparse.Namespace, hunt: Hunt, worst: Found, num_tries: int
) -> Iterable[str]:
    """Yields lines with the worst case found, its result with other seeds, and a command that
    repeats it."""
    policy, other = name_of(hunt.policy), name_of(hunt.other)
    tried = f"{num_tries} cases in {hunt.seconds:g} s"
    case, score = worst.case, worst.score
    if score.worse <= 0.0:
        yield f"{policy} was never worse than {other} by {hunt.figure}: {tried}"
        return
    yield f"the worst case of {policy} relative to {other} by {hunt.figure}: {tried}"
    if score.worse == inf:
        yield score.why
    else:
        yield (
            f"{score.times:.2f} times as bad: {score.ours:.4g} to {score.theirs:.4g}, over all "
            f"{case.workload.num_requests} requests and seeds {case.seeds[0]} to {case.seeds[-1]}"
        )
    yield from _turned(hunt.start, case)
    if score.worse < inf:
        yield ""
        yield from _again(hunt, case)
    yield ""
    yield "to repeat it:"
    yield command(parsed, case)


def _turned(start: WorstCase, case: WorstCase) -> Iterable[str]:
    """Yields a line for each option whose value in ``case`` differs from that in ``start``."""
    for name in ("num_requests", *KNOBS):
        now, then = choice(case, name), choice(start, name)
        if now != then:
            yield f"  {name} {now} (at the start: {then})"


def _again(hunt: Hunt, case: WorstCase) -> Iterable[str]:
    """Yields lines with a comparison of the two policies on the case with new seeds."""
    first = case.seeds[-1] + 1
    [cell] = compare(
        Experiment(
            policies=[hunt.other, hunt.policy],
            workload=case.workload,
            engine=case.engine,
            rate=rate_of(case),
            seeds=range(first, first + NUM_OTHERS),
            slo=hunt.slo,
            is_whole=True,
        )
    )
    if cell.left_out:
        yield from lab.left_out_lines(cell.left_out)
        return
    found = cell.difference(1, hunt.figure)
    change = f" ({100 * found.relative:+.0f} %)" if found.theirs.value else ""
    yield (
        f"with {NUM_OTHERS} other seeds: {lab.interval(found.ours, 4)} to "
        f"{lab.interval(found.theirs, 4)}{change}: {found.verdict}"
    )


def command(parsed: argparse.Namespace, case: WorstCase) -> str:
    """Returns the command line that repeats the case; its first policy is the baseline."""
    words = ["metronome", "compare", *reversed(parsed.policies), "--workload", _workload(case)]
    default = Engine()
    for name, flag in ENGINE_FLAGS.items():
        if (value := getattr(case.engine, name)) != getattr(default, name):
            words += [flag, str(value)]
    for name, flag in TYPED.items():
        if (value := getattr(parsed, name)) is not None:
            words += [flag, str(value)]
    if parsed.slo is not None:
        words += ["--slo", parsed.slo]
    if (rate := rate_of(case)) is not None:
        words += ["--rate", repr(rate)]
    words += ["--seed", str(case.seeds[0]), "--seeds", str(len(case.seeds))]
    return shlex.join([*words, "--whole", "--figures", parsed.figure])


def _workload(case: WorstCase) -> str:
    """Returns the case's workload as text, including ``num_requests``."""
    workload: Workload = case.workload
    text, number = str(workload), f"num_requests={workload.num_requests}"
    if number in text:
        return text
    return f"{text[:-1]}, {number})" if text.endswith(")") else f"{text}({number})"
