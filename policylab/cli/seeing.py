"""A page, plots and a trace of what was simulated: options that the simulating commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from policylab.cli import lab
from policylab.sim.compare import Cell
from policylab.sim.experiment import distinct
from policylab.sim.promises import slo
from policylab.sim.report import charts_of, points_from, write_plots, write_report, write_trace
from policylab.sim.run import Engine, Run, name_of
from policylab.sim.run import run as simulate
from policylab.sim.workloads import Workload

MOST_RUNS = 6  # that a page shows from within: each adds megabytes


def add_arguments(parser: argparse.ArgumentParser, *, has_one_run: bool = False) -> None:
    """``--report`` and ``--plots``; with one run ``--trace``, too."""
    group = parser.add_argument_group("to look at")
    group.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a page (HTML, needs no network): plots, and a timeline of who ran and who "
        "waited for what",
    )
    group.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="write each plot there as SVG and CSV, and as PNG and PDF with the extra 'plots'",
    )
    if has_one_run:
        group.add_argument(
            "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto (JSON)"
        )
        group.add_argument(
            "--beside",
            type=Path,
            nargs="+",
            default=[],
            metavar="FILE",
            help="files of other runs, to lay over this one in report and plots",
        )


def is_requested(parsed: argparse.Namespace) -> bool:
    """Whether anything is to be looked at, so that runs have to keep their steps. Raises
    ``ConfigError`` for a place that is none, before anything takes time."""
    paths = [getattr(parsed, name, None) for name in ("report", "trace")]
    for name, path in zip(("report", "trace"), paths, strict=True):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{name} {str(path)!r} is in no directory that exists")
    for path in getattr(parsed, "beside", []):
        if not path.is_file():
            raise ConfigError(f"--beside {str(path)!r} is no file; `simulate --out` writes one")
    if parsed.plots is not None and parsed.plots.exists() and not parsed.plots.is_dir():
        raise ConfigError(f"--plots {str(parsed.plots)!r} is a file, must be a directory")
    return any(path is not None for path in (*paths, parsed.plots))


def show_run(parsed: argparse.Namespace, run: Run, others: Sequence[Run]) -> list[str]:
    """Write the files that the options name for a run and ``others``; lines that report it."""
    limits = slo(parsed.slo) if parsed.slo else []
    runs = [run, *others]
    lines = [*lab.left_out_lines({each.policy: each.not_own for each in others if each.not_own})]
    if parsed.report is not None:
        title = f"{run.policy} on {run.head.get('workload')}"
        write_report(parsed.report, runs, slo=limits, title=title)
        lines.append(f"report: {parsed.report}")
    if parsed.plots is not None:
        lines += [f"plots: {parsed.plots}", *write_plots(parsed.plots, charts_of(runs, slo=limits))]
    if parsed.trace is not None:
        write_trace(parsed.trace, run)
        lines.append(f"trace: {parsed.trace}, to be opened in Perfetto")
    return lines


def show_cells(
    parsed: argparse.Namespace,
    cells: Sequence[Cell],
    policies: Sequence[Any],
    workload: Workload,
    engine: Engine,
) -> list[str]:
    """Show the cells of a comparison. Its first seed is run once more, with steps, at the highest
    load at which the first policy is not overloaded."""
    limits = slo(parsed.slo) if parsed.slo else []
    cell = _shown(cells)
    names = distinct(name_of(policy) for policy in policies)
    own = [policy for n, policy in zip(names, policies, strict=True) if n not in cell.left_out]
    runs = [
        simulate(policy, workload, engine, seed=parsed.seed, rate=cell.rate, steps=True)
        for policy in own[:MOST_RUNS]
    ]
    points = points_from(cells)
    lines = []
    if len(own) > MOST_RUNS:
        lines.append(f"of {len(own)} policies the first {MOST_RUNS} have a timeline")
    if parsed.report is not None:
        title = f"{', '.join(cell.names) or 'no policy'} on {workload}"
        write_report(
            parsed.report,
            runs,
            points=points,
            slo=limits,
            title=title,
            left_out=cell.left_out,
        )
        lines.append(f"report: {parsed.report}")
    if parsed.plots is not None:
        charts = charts_of(runs, points=points, slo=limits)
        lines += [f"plots: {parsed.plots}", *write_plots(parsed.plots, charts)]
    return lines


def _shown(cells: Sequence[Cell]) -> Cell:
    """The one whose runs are shown."""

    same = [cell for cell in cells if cell.setting == cells[0].setting]
    ascending = sorted(same, key=lambda cell: cell.rate or 0.0)
    if not cells[0].names:
        return ascending[0]
    steady = [cell for cell in ascending if 2 * cell.num_overloaded(0) <= len(cell.figures[0])]
    return steady[-1] if steady else ascending[0]
