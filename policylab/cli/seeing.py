"""Command-line options that write an HTML page, plots or a trace of simulated runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from policylab.cli import lab
from policylab.sim.compare import Cell
from policylab.sim.experiment import distinct
from policylab.sim.job import NOTHING
from policylab.sim.promises import slo
from policylab.sim.report import (
    Point,
    charts_of,
    points_from,
    write_plots,
    write_report,
    write_trace,
)
from policylab.sim.run import Engine, Run, name_of
from policylab.sim.run import run as simulate
from policylab.sim.workloads import Workload

MOST_RUNS = 6  # with a timeline on a page: each adds megabytes


def add_arguments(parser: argparse.ArgumentParser, *, has_one_run: bool = False) -> None:
    """Add ``--report`` and ``--plots``; with one run also ``--trace`` and ``--beside``."""
    group = parser.add_argument_group("pictures")
    group.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write an HTML page: plots, and a timeline of which requests ran "
        "and what the others waited for",
    )
    group.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="write each plot here as SVG and CSV, and with the extra 'plots' as PNG and PDF",
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
            help="files of other runs, shown next to this one in report and plots",
        )


def is_requested(parsed: argparse.Namespace) -> bool:
    """True if a page, plots or a trace is requested, for which runs must keep a record of each
    step. Raises ``ConfigError`` for a path that cannot be used."""
    paths = [getattr(parsed, name, None) for name in ("report", "trace")]
    for name, path in zip(("report", "trace"), paths, strict=True):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{name} {str(path)!r}: create its directory first")
    for path in getattr(parsed, "beside", []):
        if not path.is_file():
            raise ConfigError(f"--beside {str(path)!r} is no file; `simulate --out` writes one")
    if parsed.plots is not None and parsed.plots.exists() and not parsed.plots.is_dir():
        raise ConfigError(f"--plots {str(parsed.plots)!r} is a file, must be a directory")
    return any(path is not None for path in (*paths, parsed.plots))


def show_run(parsed: argparse.Namespace, run: Run, others: Sequence[Run]) -> list[str]:
    """Write the page, plots and trace that the options name. ``others``: runs to show next to it.
    Returns lines for the user."""
    lines = [*lab.left_out_lines({each.policy: each.not_own for each in others if each.not_own})]
    lines += _written(parsed, f"{run.policy} on {run.head.get('workload')}", [run, *others])
    if parsed.trace is not None:
        write_trace(parsed.trace, run)
        lines.append(f"trace: {parsed.trace} (open it in Perfetto)")
    return lines


def show_cells(
    parsed: argparse.Namespace,
    cells: Sequence[Cell],
    policies: Sequence[Any],
    workload: Workload,
    engine: Engine,
) -> list[str]:
    """Write the page and the plots that the options name. Returns lines for the user. For the
    timeline, policies run again with the first seed, at the highest load at which the first policy
    is not overloaded."""
    cell = _shown(cells)
    names = distinct(name_of(policy) for policy in policies)
    own = [policy for n, policy in zip(names, policies, strict=True) if n not in cell.left_out]
    runs = [
        simulate(policy, workload, engine, seed=parsed.seed, rate=cell.rate, steps=True)
        for policy in own[:MOST_RUNS]
    ]
    title = f"{', '.join(cell.names) or 'no policy'} on {workload}"
    cut = f"only the first {MOST_RUNS} of {len(own)} policies have a timeline"
    written = _written(parsed, title, runs, points_from(cells), cell.left_out)
    return [cut, *written] if len(own) > MOST_RUNS else written


def _written(
    parsed: argparse.Namespace,
    title: str,
    runs: Sequence[Run],
    points: Sequence[Point] = (),
    left_out: Mapping[str, str] = NOTHING,
) -> list[str]:
    """Write the page and the plots that the options name. Returns lines for the user."""
    limits = slo(parsed.slo) if parsed.slo else []
    more = [name.strip() for name in (getattr(parsed, "figures", None) or "").split(",")]
    more = [name for name in more if name]
    lines = []
    if parsed.report is not None:
        write_report(
            parsed.report,
            runs,
            points=points,
            slo=limits,
            title=title,
            left_out=left_out,
            figures=more,
        )
        lines.append(f"report: {parsed.report}")
    if parsed.plots is not None:
        charts = charts_of(runs, points=points, slo=limits, figures=more)
        lines += [f"plots: {parsed.plots}", *write_plots(parsed.plots, charts)]
    return lines


def _shown(cells: Sequence[Cell]) -> Cell:
    """Choose the cell to show: among those with the first setting, the one with the highest load at
    which the first policy is not overloaded."""
    same = [cell for cell in cells if cell.setting == cells[0].setting]
    ascending = sorted(same, key=lambda cell: cell.rate or 0.0)
    if not cells[0].names:
        return ascending[0]
    steady = [cell for cell in ascending if 2 * cell.num_overloaded(0) <= len(cell.figures[0])]
    return steady[-1] if steady else ascending[0]
