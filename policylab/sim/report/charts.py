"""The contents of plots, independent of the renderer: series, labels and captions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

Cell = str | float | int | None

LINE, STEPS, DOTS, BOTH = "line", "steps", "dots", "line and dots"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one set of dots, in a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """The lower ends of intervals of ``y``; empty without intervals."""
    high: Sequence[float] = ()
    mark: str = LINE


class Level(NamedTuple):
    """A horizontal or vertical line across the whole plot, with its name."""

    value: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot. ``key``: its file name without extension."""

    key: str
    title: str
    caption: str

    def rows(self) -> Iterator[list[Cell]]:
        """The plotted numbers as rows of a table; the first row has the column names."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to plot."""
        return len(list(self.rows())) < 2


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """A plot of series of points, with numbers on both axes."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    levels: Sequence[Level] = ()
    """Horizontal lines, at values of ``y``."""
    moments: Sequence[Level] = ()
    """Vertical lines, at values of ``x``."""
    is_share: bool = False
    """Values of ``y`` are shares, so they and the axis stay within 0..1."""
    is_apart: bool = False
    """Dots of several series at the same place are moved apart, so that none hides another."""

    def rows(self) -> Iterator[list[Cell]]:
        has_intervals = any(each.low for each in self.series)
        yield ["series", self.x_label, self.y_label, *(["low", "high"] if has_intervals else [])]
        for each in self.series:
            for place, (x, y) in enumerate(zip(each.x, each.y, strict=True)):
                row: list[Cell] = [each.name, x, y]
                if has_intervals:
                    row += [each.low[place], each.high[place]] if each.low else ["", ""]
                yield row

    def is_shown(self, x: float, y: float) -> bool:
        """True if the point can be plotted; on a logarithmic axis it must be above 0."""
        is_there = isfinite(x) and isfinite(y)
        return is_there and not (self.log_x and x <= 0) and not (self.log_y and y <= 0)


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """A bar chart with several groups, each of which has one bar per name in ``bars``."""

    y_label: str
    groups: Sequence[str]
    bars: dict[str, Sequence[float]] = field(default_factory=dict)
    """For each name, its value in every group."""
    levels: Sequence[Level] = ()

    def rows(self) -> Iterator[list[Cell]]:
        yield ["group", *self.bars]
        for place, group in enumerate(self.groups):
            yield [group, *(values[place] for values in self.bars.values())]


@dataclass(frozen=True, kw_only=True)
class Grid(Chart):
    """A heat map: ``values[row][column]``, NaN for an empty cell."""

    x_label: str
    y_label: str
    columns: Sequence[str]
    lines: Sequence[str]
    values: Sequence[Sequence[float]]
    unit: str
    """What the values measure."""

    def rows(self) -> Iterator[list[Cell]]:
        yield [self.y_label, self.x_label, self.unit]
        for line, values in zip(self.lines, self.values, strict=True):
            for column, value in zip(self.columns, values, strict=True):
                if isfinite(value):
                    yield [line, column, value]


class Bar(NamedTuple):
    """One bar of a Gantt chart: the time that the request in line ``row`` spent in one state."""

    row: int
    start: float
    end: float
    state: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Gantt(Chart):
    """A Gantt chart of requests."""

    names: Sequence[str]
    bars: Sequence[Bar]
    states: Sequence[str]
    """The names of all states, in the order of their colours."""

    def rows(self) -> Iterator[list[Cell]]:
        yield ["request", "start", "end", "state", "why"]
        for bar in self.bars:
            yield [self.names[bar.row], bar.start, bar.end, bar.state, bar.why]


def shown(charts: Iterable[Chart]) -> list[Chart]:
    """The charts that are not empty."""
    return [chart for chart in charts if not chart.is_empty]
