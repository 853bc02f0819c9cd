"""Charts as PNG, by matplotlib, which is optional."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from policylab.sim.report.charts import BOTH, DOTS, STEPS, Bars, Chart, Gantt, Grid, Lines
from policylab.sim.report.svg import COLOURS, RED

EXTRA = "metronome-engine[plots]"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_png(chart: Chart, path: Path) -> None:
    """Draw the chart into a file."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no state of the process

    matplotlib.rcParams.update({"text.parse_math": False, "svg.hashsalt": "0"})
    height = 1.5 + 0.16 * len(chart.names) if isinstance(chart, Gantt) else 4.2
    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(chart.title, fontsize=10)
    if isinstance(chart, Lines):
        _lines(chart, axes)
    elif isinstance(chart, Bars):
        _bars(chart, axes)
    elif isinstance(chart, Grid):
        _grid(chart, axes)
    elif isinstance(chart, Gantt):
        _gantt(chart, axes)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _lines(chart: Lines, axes: Any) -> None:
    for place, each in enumerate(chart.series):
        style = {"color": COLOURS[place % len(COLOURS)], "label": each.name.lstrip("_") or " "}
        marker = "o" if each.mark in (DOTS, BOTH) else None
        line = "none" if each.mark == DOTS else "solid"
        drawn = "steps-post" if each.mark == STEPS else "default"
        axes.plot(
            each.x, each.y, marker=marker, linestyle=line, drawstyle=drawn, markersize=3, **style
        )
        if each.low:
            known = np.isfinite(each.low) & np.isfinite(each.high)
            x, low, high = (np.array(part)[known] for part in (each.x, each.low, each.high))
            axes.vlines(x, low, high, color=style["color"], linewidth=0.8)
    for level in chart.levels:
        axes.axhline(level.value, color=RED, linewidth=0.6, label=level.name or None)
    for moment in chart.moments:
        axes.axvline(moment.value, color=RED, linewidth=0.6, label=moment.name or None)
    if chart.is_share:
        axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(1.0, axes.get_ylim()[1]))
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.3)
    if len(chart.series) > 1 or chart.levels or chart.moments:
        axes.legend(fontsize=7)


def _bars(chart: Bars, axes: Any) -> None:
    width = 0.8 / max(1, len(chart.bars))
    places = np.arange(len(chart.groups))
    for rank, (name, values) in enumerate(chart.bars.items()):
        where = places + width * (rank - (len(chart.bars) - 1) / 2)
        axes.bar(where, values, width, label=name, color=COLOURS[rank % len(COLOURS)])
    for level in chart.levels:
        axes.axhline(level.value, color=RED, linewidth=0.8)
    axes.set_xticks(places, chart.groups, rotation=20, ha="right", fontsize=7)
    axes.set_ylabel(chart.y_label)
    if len(chart.bars) > 1:
        axes.legend(fontsize=7)


def _grid(chart: Grid, axes: Any) -> None:
    values = np.array(chart.values, dtype=np.float64)
    axes.imshow(values, origin="lower", aspect="auto", cmap="YlGnBu")
    for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
        axes.text(column, row, f"{values[row, column]:.3g}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(chart.columns)), chart.columns)
    axes.set_yticks(range(len(chart.lines)), chart.lines)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)


def _gantt(chart: Gantt, axes: Any) -> None:
    for place, state in enumerate(chart.states):
        bars = [bar for bar in chart.bars if bar.state == state]
        if bars:
            axes.barh(
                [bar.row for bar in bars],
                [bar.end - bar.start for bar in bars],
                left=[bar.start for bar in bars],
                color=COLOURS[place % len(COLOURS)],
                label=state,
            )
    axes.set_yticks(range(len(chart.names)), chart.names, fontsize=5)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start of the run")
    axes.legend(fontsize=7)
