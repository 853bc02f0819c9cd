"""Compare policies on the same requests over many seeds and test the differences.

metronome compare fcfs residual-sjf vtc --seeds 20 --loads 0.6,0.8,0.9 --jobs 2
    metronome compare fcfs sarathi --workload azure-conv --sweep max_num_batched_tokens=256,512
    metronome compare fcfs sarathi --seeds 3 --capacity "ttft.p99<1,itl.p99<0.1"
    metronome compare --worst residual-sjf,fcfs --figure e2e.p99 --seconds 120

The other policies are compared with the first one, in pairs of runs that serve the same requests.
The number after ± is half the width of a 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
from typing import Any

from engine.errors import ConfigError
from policylab.cli import capacity, lab, seeing, worst
from policylab.cli.policies import coming, loads_of, rows_of
from policylab.sim.capacity import EXAMPLE
from policylab.sim.compare import NO_MEANS, Cell, Difference, Experiment, compare, variations
from policylab.sim.experiment import seeds_from
from policylab.sim.figures import NAMES
from policylab.sim.named import split
from policylab.sim.promises import slo
from policylab.sim.run import Engine, name_of
from policylab.sim.workloads import Workload

SHOWN = (
    *("ttft.mean", "ttft.p99", "tpot.mean", "itl.p99", "e2e.mean", "e2e.p99", "normalised.mean"),
    *("slowdown.p99", "program.mean", "tokens_per_second", "attainment", "goodput", "jain", "gap"),
    "recomputed",
    *("prompt_tokens.dense", "snapshot_peak", "adapter_loads", "adapter_reads"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policies",
        nargs="*",
        metavar="POLICY",
        help="names or dotted paths, optionally with options, as in 'edf(default_deadline=5)'",
    )
    lab.add_requests(parser)
    parser.add_argument(
        "--loads",
        metavar="X,Y,...",
        help="arrival rates as shares of the rate that fcfs can serve; default: "
        f"{lab.LOAD_BY_DEFAULT}",
    )
    lab.add_rate_and_seeds(parser, in_place_of="--loads", num_seeds=10)
    parser.add_argument(
        "--sweep",
        metavar="OPTION=A,B,...",
        help="run with several values of an option of the engine, workload or scheduler",
    )
    parser.add_argument(
        "--figures",
        metavar="NAMES",
        help=f"print only these, and plot them over the load; of: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--capacity",
        metavar="LIMITS",
        help="find the highest request rate at which these limits are kept, as in "
        f"{EXAMPLE!r}, to within 1 %%",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="count all requests, including warm-up and overloaded runs",
    )
    parser.add_argument(
        "--unpaired",
        action="store_true",
        help="draw other requests for each policy, to see how much chance alone contributes",
    )
    parser.add_argument("--json", action="store_true", help="all figures of all runs, as JSON")
    parser.add_argument("--csv", action="store_true", help="all figures of all runs, as CSV")
    worst.add_arguments(parser)
    seeing.add_arguments(parser)
    lab.add_engine(parser)


def run(parsed: argparse.Namespace) -> int:
    is_seen = seeing.is_requested(parsed)
    workload = lab.workload_of(parsed)
    engine = lab.engine_of(parsed, lab.log_of(workload))
    _check(parsed)
    rate = lab.rate_of(parsed.rate, workload)
    shown = _figures(parsed.figures)
    policies = [lab.variant(text, "POLICY") for text in parsed.policies]
    if parsed.worst is not None:
        return worst.run(parsed, policies, _loads(parsed.loads))
    what = Experiment(
        policies=policies,
        workload=workload,
        engine=engine,
        loads=_loads(parsed.loads) or loads_of(None, rate, workload),
        rate=rate,
        seeds=seeds_from(parsed.seed, parsed.seeds),
        slo=slo(parsed.slo) if parsed.slo else [],
        sweep=swept(parsed.sweep) if parsed.sweep else None,
        is_paired=not parsed.unpaired,
        is_whole=parsed.whole,
    )
    if parsed.capacity is not None:
        return capacity.run(parsed, what)
    cells = compare(what, jobs=parsed.jobs, progress=lab.Progress())
    first = variations(what)[0][1:]  # a page shows runs of the first setting
    seen = seeing.show_cells(parsed, cells, policies, *first) if is_seen else []
    left_out = cells[0].left_out
    status = 1 if left_out else 0
    if parsed.json or parsed.csv:
        rows = [row for cell in cells for row in rows_of(cell, parsed.seed)]
        print(lab.as_json(rows) if parsed.json else lab.as_csv(rows))
        return status
    print(*_head(parsed, workload, engine), sep="\n")
    if cells[0].rate is None and (own := lab.own_arrivals(workload, engine)):
        print(own)
    for cell in cells:
        print("", *described(cell, shown), sep="\n")
    if left_out:
        print("", *lab.left_out_lines(left_out), sep="\n")
    if cells[0].names and name_of(policies[0]) in left_out:
        print(f"differences are from {cells[0].names[0]}, the first policy that has figures")
    if seen:
        print("", *seen, sep="\n")
    return status


def _check(parsed: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that cannot be combined."""
    lab.one_of(parsed, "json", "csv", "the output format")
    lab.one_of(parsed, "loads", "rate", "the arrival rate")


def swept(text: str) -> tuple[str, list[Any]]:
    """Parse ``option=a,b,c``. Returns the option and its values, which may be Python literals or
    unquoted words."""
    name, _, values = text.partition("=")
    found = [_value(part) for part in split(values)]
    if not name.isidentifier() or not found:
        raise ConfigError(f"--sweep has {text!r}, must be as in max_num_batched_tokens=256,512")
    return name, found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _loads(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"--loads has {text!r}, must be as in 0.6,0.8,0.9") from error


def _figures(text: str | None) -> list[str]:
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"figure {name!r} is not known; there are: {', '.join(NAMES)}")
    return names or list(SHOWN)


def _head(parsed: argparse.Namespace, workload: Workload, engine: Engine) -> Iterable[str]:
    how = "other requests for each policy" if parsed.unpaired else "the same requests for each"
    yield f"{workload}: {parsed.seeds} seeds from {parsed.seed} on, {how} policy"
    if parsed.whole:
        yield "whole runs: warm-up counts, and so does all of an overloaded run"
    yield lab.engine_line(engine, workload)
    yield lab.cost_line(engine)


def described(cell: Cell, shown: list[str]) -> Iterable[str]:
    """Yields the lines for one load and setting: the figures named in ``shown`` of each policy,
    with the difference from the first policy."""
    load = "" if cell.load is None else f"load {cell.load:g}: "
    yield f"{cell.setting + '; ' if cell.setting else ''}{load}{coming(cell)}"
    if not cell.names:
        return
    base, *others = cell.names
    rows: list[tuple[str, ...]] = [("", base, *(c for n in others for c in (n, "difference", "")))]
    for name in shown:
        places = range(len(cell.names))
        if not any(cell.num_with(place, name) for place in places):
            continue
        found = [cell.difference(place, name) for place in places]
        digits = 0 if any(each.ours.value > 999 for each in found) else 4
        row = [name, lab.mean(cell, 0, name, digits)]
        for place, each in enumerate(found[1:], start=1):
            row += [lab.mean(cell, place, name, digits), _relative(each), each.verdict]
        rows.append(tuple(row))
    yield from lab.aligned(rows)
    for place, name in enumerate(cell.names):
        if over := cell.num_overloaded(place):
            seeds = len(cell.figures[place])
            what = next(e.window.growing for e in cell.figures[place] if e.is_overloaded)
            yield (
                f"{name}: overloaded with {over} of {seeds} seeds, as {what} grows to the end: its "
                "latencies have no means; give more --requests if it is chance, or --whole to "
                "count all"
            )
    yield from cell.collapses()


def _relative(each: Difference) -> str:
    """Returns a difference in percent of the first policy's value ± half the width of its
    confidence interval."""
    scale = abs(each.theirs.value)
    if each.verdict == NO_MEANS or not scale or scale != scale:
        return "-"
    half = (each.by.high - each.by.low) / 2 / scale
    shown = f"{100 * each.by.value / scale:+.1f} %"
    return shown if half == float("inf") else f"{shown} ±{100 * half:.1f}"
