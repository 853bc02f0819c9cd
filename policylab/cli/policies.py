"""Compare scheduling policies on a virtual clock: no model, no GPU, seconds.

The same seed gives the same table. A policy is the name of a shipped or installed policy, or the
dotted path of a class in the current directory, optionally with options as in ``--policies
"fcfs,edf(default_deadline=5),edf(default_deadline=50)"``. `metronome compare` tests which
differences are significant; `metronome simulate` prints all figures of one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from engine.sched.plugins.find import installed_policies
from engine.sched.policies import POLICIES
from policylab.cli import lab, seeing
from policylab.sim.compare import Cell, Experiment, compare
from policylab.sim.experiment import seeds_from
from policylab.sim.figures import Figures
from policylab.sim.promises import slo
from policylab.sim.run import Engine
from policylab.sim.workloads import Workload
from policylab.sim.workloads.reader import FileWorkload

COLUMNS = {
    "TTFT mean": ("ttft.mean", 3),
    "TTFT p99": ("ttft.p99", 3),
    "TPOT mean": ("tpot.mean", 4),
    "ITL p99": ("itl.p99", 4),
    "E2E mean": ("e2e.mean", 3),
    "E2E p99": ("e2e.p99", 3),
    "tokens/s": ("tokens_per_second", 0),
    "kept": ("attainment", 3),
    "goodput": ("goodput", 2),
    "Jain": ("jain", 3),
}
FURTHER = ("preempted", "recomputed", "KV peak", "x bound")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        default="fcfs,residual-sjf",
        metavar="NAMES",
        help="names or dotted paths, optionally with options, as in "
        "'fcfs,edf(default_deadline=5)'; default: %(default)s",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the shipped and installed policies"
    )
    lab.add_requests(parser)
    parser.add_argument(
        "--load",
        type=float,
        metavar="X",
        help="arrival rate as a share of the rate that fcfs can serve; default: "
        f"{lab.LOAD_BY_DEFAULT}",
    )
    lab.add_rate_and_seeds(parser, in_place_of="--load", num_seeds=1)
    parser.add_argument("--json", action="store_true", help="all figures, as JSON")
    parser.add_argument("--csv", action="store_true", help="all figures, as CSV")
    seeing.add_arguments(parser)
    lab.add_engine(parser)


def run(parsed: argparse.Namespace) -> int:
    if parsed.list:
        print(*listed(), sep="\n")
        return 0
    is_shown = seeing.is_requested(parsed)
    workload = lab.workload_of(parsed)
    lab.one_of(parsed, "json", "csv", "the output format")
    lab.one_of(parsed, "load", "rate", "the arrival rate")
    rate = lab.rate_of(parsed.rate, workload)
    engine = lab.engine_of(parsed, lab.log_of(workload))
    policies = lab.variants(parsed.policies)
    [cell] = compare(
        Experiment(
            policies=policies,
            workload=workload,
            engine=engine,
            loads=loads_of(parsed.load, rate, workload),
            rate=rate,
            seeds=seeds_from(parsed.seed, parsed.seeds),
            slo=slo(parsed.slo) if parsed.slo else [],
        ),
        jobs=parsed.jobs,
        progress=lab.Progress(),
    )
    shown = seeing.show_cells(parsed, [cell], policies, workload, engine) if is_shown else []
    status = 1 if cell.left_out else 0
    if parsed.json or parsed.csv:
        found = rows_of(cell, parsed.seed)
        print(lab.as_json(found) if parsed.json else lab.as_csv(found))
        return status
    print(*conditions(cell, workload, engine, parsed), "", sep="\n")
    if cell.names:
        print(*table(cell), "", sep="\n")
        print(*remarks(cell), sep="\n")
    print(*lab.left_out_lines(cell.left_out), sep="\n")
    if shown:
        print("", *shown, sep="\n")
    return status


def loads_of(load: float | None, rate: float | None, workload: Workload) -> list[float] | None:
    """Returns the loads to simulate. ``None`` if a rate is given, or if no load is given and the
    workload sets its own arrivals (a file or a closed loop)."""
    if load is None and (
        rate is not None or workload.natural_rate is None or isinstance(workload, FileWorkload)
    ):
        return None
    return [lab.LOAD if load is None else load]


def listed() -> Iterable[str]:
    """Yields a line with name and summary for each policy: shipped ones, then installed ones."""
    installed = installed_policies()
    width = max(map(len, [*POLICIES, *installed]))
    for name, policy in sorted(POLICIES.items()):
        yield f"{name:{width}}  {_summary(policy)}"
    for name, found in sorted(installed.items()):
        summary = f"{_summary(found)} ({found.__module__})" if isinstance(found, type) else found
        yield f"{name:{width}}  {summary}"


def _summary(policy: type) -> str:
    """Returns the first line of the policy's docstring."""
    return next(iter((policy.__doc__ or "").strip().splitlines()), "no docstring")


def conditions(
    cell: Cell, workload: Workload, engine: Engine, parsed: argparse.Namespace
) -> Iterable[str]:
    """Yields lines with the settings that a reader needs to judge and to repeat the figures."""
    count = parsed.seeds
    seeds = f"seed {parsed.seed}" if count == 1 else f"{count} seeds from {parsed.seed} on"
    size = f"{cell.figures[0][0].num_requests} requests, " if cell.names else ""
    own = lab.own_arrivals(workload, engine) if cell.rate is None else ""
    yield f"{size}{seeds}: {coming(cell)}{own and f': {own}'}"
    yield f"workload: {workload}"
    yield lab.engine_line(engine, workload)
    yield lab.cost_line(engine)


def coming(cell: Cell) -> str:
    """Returns the arrival rate of requests as text."""
    if cell.rate is None:
        return "arrivals as the workload sets them"
    serves = "" if cell.capacity is None else f"; fcfs can serve {cell.capacity:.2f}"
    return f"{cell.rate:.2f} requests per second{serves}"


def rows_of(cell: Cell, first_seed: int) -> list[dict[str, Any]]:
    """Returns one table row for each policy and seed: every figure, the policy's numbers of seeds
    and of overloaded runs, and the names of policies without figures. If no policy has figures, a
    single row has these names."""
    where = {"load": cell.load, "rate": cell.rate, "capacity": cell.capacity}
    more = {"setting": cell.setting, "left_out": lab.left_out_text(cell.left_out)}
    rows = [
        {
            "policy": name,
            "seed": first_seed + number,
            **where,
            **more,
            "num_seeds": len(column),
            "num_overloaded": cell.num_overloaded(place),
            "state": each.window.state,
            **each.values(),
            "hook_seconds": each.hook_seconds,
        }
        for place, (name, column) in enumerate(zip(cell.names, cell.figures, strict=True))
        for number, each in enumerate(column)
    ]
    return rows or [{"policy": "", **where, **more}]


def table(cell: Cell) -> Iterable[str]:
    """Yields the lines of a table of figures: means over the seeds, times in seconds."""
    shown = {
        title: of
        for title, of in COLUMNS.items()
        if title not in ("kept", "goodput", "Jain")
        or any(cell.num_with(place, of[0]) for place in range(len(cell.names)))
    }
    rows = [("policy", *shown, *FURTHER)]
    rows += [_row(cell, place, shown) for place in range(len(cell.names))]
    yield from lab.aligned(rows)


def _row(cell: Cell, place: int, shown: dict[str, tuple[str, int]]) -> tuple[str, ...]:
    def value(figure: str) -> float:
        return cell.over_seeds(place, figure).value

    cells = [lab.mean(cell, place, name, digits) for name, digits in shown.values()]
    if cell.num_overloaded(place) == len(cell.figures[place]):
        cells[0] = "overloaded"
    preempted = sum(each.num_preemptions for each in cell.figures[place])
    return (
        cell.names[place],
        *cells,
        f"{preempted / len(cell.figures[place]):.0f}",
        f"{100.0 * value('recomputed'):.1f} %",
        f"{100.0 * value('kv_peak'):.0f} %",
        lab.number(value("e2e.bound"), 2),
    )


def remarks(cell: Cell) -> Iterable[str]:
    """Yields lines about the real time in hooks, the lower bounds for any policy, and problems."""
    columns = dict(zip(cell.names, cell.figures, strict=True))
    hooks = ", ".join(f"{name} {_hook_time(column):.0f}" for name, column in columns.items())
    yield f"real time in hooks, us per step (differs from run to run): {hooks}"
    first = cell.figures[0][0]
    if first.bounds is not None:
        yield (
            f"lower bounds of the whole run: mean E2E {first.bounds.mean_e2e:.3f} s, "
            f"makespan {first.bounds.makespan:.1f} s (first seed)"
        )
    for name, column in columns.items():
        yield from _warnings(name, column)
    yield from cell.collapses()


def _hook_time(column: list[Figures]) -> float:
    steps = sum(each.num_steps for each in column)
    return 1e6 * sum(each.hook_seconds for each in column) / max(1, steps)


def _warnings(name: str, column: list[Figures]) -> Iterable[str]:
    if over := sum(each.is_overloaded for each in column):
        part = "" if len(column) == 1 else f" with {over} of {len(column)} seeds"
        what = next(each.window.growing for each in column if each.is_overloaded)
        yield f"{name}: overloaded{part}: {what} grows to the end, so latencies have no mean"
    if short := sum(each.window.is_short for each in column):
        part = "" if len(column) == 1 else f" with {short} of {len(column)} seeds"
        yield (
            f"{name}: about half of the requests were warm-up{part}, and it may not be over: "
            "give more --requests; of a file, `metronome compare --whole` counts all"
        )
    if refused := sum(each.num_refused for each in column):
        yield f"{name}: {refused} requests were refused or failed"
