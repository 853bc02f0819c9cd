"""Write the report's page and its plots."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from engine.errors import ConfigError
from policylab.sim.promises import Limit
from policylab.sim.report import distributions, loads, timelines
from policylab.sim.report.charts import Chart, shown
from policylab.sim.report.data import data_of
from policylab.sim.report.images import EXTRA, LIBRARIES, can_draw, write_images
from policylab.sim.report.page import page
from policylab.sim.report.subjects import Point, Subject, points_of, subjects, which_runs
from policylab.sim.report.svg import svg
from policylab.sim.run import Run

NEEDED = f"{', '.join(LIBRARIES[:-1])} and {LIBRARIES[-1]}"
Section = tuple[str, str, Sequence[Chart]]


def write_report(
    path: str | Path,
    runs: Sequence[Run],
    *,
    points: Sequence[Point] = (),
    slo: Sequence[Limit] = (),
    title: str = "Metronome: what a run looks like",
    left_out: Mapping[str, str] = MappingProxyType({}),
    figures: Sequence[str] = (),
) -> None:
    """Write an HTML page about the runs.

    ``points``: the results of a comparison, one for each policy and load; by default one for each
    run with an arrival rate. ``slo``: latency limits for every request, in place of its own.
    ``left_out``: names of policies without figures, with the reasons. ``figures``: names of more
    figures to plot over the load. A run with recorded steps
    gets a timeline. Raises ``ConfigError`` if the file cannot be written."""
    found = subjects(runs, slo, points)
    points = list(points) or points_of(found)
    sections = list(_sections(found, points, slo, figures))
    charts = [chart for _, _, each in sections for chart in each]
    missing = {**left_out, **{run.policy: run.not_own for run in runs if run.not_own}}
    text = page(title, found, sections, data_of(found, points, charts, missing))
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def charts_of(
    runs: Sequence[Run],
    *,
    points: Sequence[Point] = (),
    slo: Sequence[Limit] = (),
    figures: Sequence[str] = (),
) -> list[Chart]:
    """All charts of the runs that are not empty. The arguments are those of ``write_report``."""
    found = subjects(runs, slo, points)
    sections = _sections(found, list(points) or points_of(found), slo, figures)
    return [chart for _, _, each in sections for chart in each]


def write_plots(
    directory: str | Path, charts: Sequence[Chart], *, images: bool | None = None
) -> list[str]:
    """Write each chart as SVG and CSV, and optionally as PNG and PDF.

    ``images``: also write PNG and PDF; ``None``: if the libraries of the extra ``plots`` are
    installed. Returns warnings for the user about missing files. Raises ``ConfigError`` if SVG or
    CSV files cannot be written."""
    has_images = can_draw() if images is None else images
    if has_images and not can_draw():
        raise ConfigError(f"PNG and PDF files need {NEEDED}: pip install '{EXTRA}'")
    where = Path(directory)
    try:
        where.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            text = svg(chart, is_file=True)
            (where / f"{chart.key}.svg").write_text(text, encoding="utf-8", errors="replace")
            with (where / f"{chart.key}.csv").open(
                "w", encoding="utf-8", errors="replace", newline=""
            ) as file:
                csv.writer(file).writerows(chart.rows())
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from error
    if not has_images:
        return [f"no PNG and PDF files were written, which need {NEEDED}: pip install '{EXTRA}'"]
    try:
        for chart in charts:
            write_images(chart, where)
    except OSError as error:  # the SVG files have the same content
        return [f"not all PNG and PDF files were written: {error.strerror or error}"]
    return []


def _sections(
    found: Sequence[Subject],
    points: Sequence[Point],
    slo: Sequence[Limit],
    figures: Sequence[str],
) -> Iterator[Section]:
    if len({point.rate for point in points}) > 1:
        yield (
            "Over load",
            "How each policy performs as the arrival rate grows: where it becomes slow, and where "
            "it collapses. Dots are means over seeds, bars 95 % intervals; an arrow at the end "
            "of a bar means that it continues beyond the picture. No bar: a single seed.",
            shown([*loads.over_load(points, figures), *loads.pareto(points)]),
        )
    yield (
        "Simulated against real",
        "The same requests, served in real time and on a virtual clock.",
        shown(loads.errors(points)),
    )
    yield (
        "Distributions of latencies",
        f"A mean hides requests that wait long; these curves show them. {which_runs(found)}",
        shown(
            [
                *distributions.spread(found, slo),
                *distributions.attainment_by_scale(found, slo),
                *distributions.slowdowns(found),
            ]
        ),
    )
    yield (
        "Costs",
        "Distance to lower bounds, recomputed tokens, and the time of the policy's hooks. "
        f"{which_runs(found)}",
        shown([*distributions.bounds(found), *loads.pressure(points), *distributions.hooks(found)]),
    )
    for place, each in enumerate(found):
        yield (
            f"Over time: {each.label}{f', {each.where}' if each.where else ''}",
            "The run from its start to its end.",
            shown(timelines.timelines(each, place)),
        )
