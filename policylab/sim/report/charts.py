"""What a plot shows, whatever draws it: named numbers, labels and a caption in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

Cell = str | float | int | None

LINE, STEPS, DOTS, BOTH = "line", "steps", "dots", "line and dots"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one cloud of dots."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    """The lower ends of intervals of ``y``, where there are any."""
    high: Sequence[float] = ()
    mark: str = LINE


class Level(NamedTuple):
    """A line across the plot."""

    value: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot. ``key`` names its files."""

    key: str
    title: str
    caption: str

    def rows(self) -> Iterator[list[Cell]]:
        """What it shows as a table, its head first."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """There is nothing to show."""
        return len(list(self.rows())) < 2


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Numbers over numbers."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    levels: Sequence[Level] = ()
    """Values of ``y``."""
    moments: Sequence[Level] = ()
    """Values of ``x``."""
    is_share: bool = False
    """``y`` is within 0..1, and so is its axis."""
    is_apart: bool = False
    """Dots of several series at one place stand side by side, so that none hides another."""

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
        """Whether there is such a place: logarithms have none for 0."""
        is_there = isfinite(x) and isfinite(y)
        return is_there and not (self.log_x and x <= 0) and not (self.log_y and y <= 0)


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """A bar for each name in each group."""

    y_label: str
    groups: Sequence[str]
    bars: dict[str, Sequence[float]] = field(default_factory=dict)
    """By name, a value for each group."""
    levels: Sequence[Level] = ()

    def rows(self) -> Iterator[list[Cell]]:
        yield ["group", *self.bars]
        for place, group in enumerate(self.groups):
            yield [group, *(values[place] for values in self.bars.values())]


@dataclass(frozen=True, kw_only=True)
class Grid(Chart):
    """A heat map: ``values[row][column]``, NaN where there is none."""

    x_label: str
    y_label: str
    columns: Sequence[str]
    lines: Sequence[str]
    values: Sequence[Sequence[float]]
    unit: str
    """What a value is."""

    def rows(self) -> Iterator[list[Cell]]:
        yield [self.y_label, self.x_label, self.unit]
        for line, values in zip(self.lines, self.values, strict=True):
            for column, value in zip(self.columns, values, strict=True):
                if isfinite(value):
                    yield [line, column, value]


class Bar(NamedTuple):
    """A time in one state, in the row of one request."""

    row: int
    start: float
    end: float
    state: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Gantt(Chart):
    """What each of some requests did when."""

    names: Sequence[str]
    bars: Sequence[Bar]
    states: Sequence[str]
    """In the order of their colours."""

    def rows(self) -> Iterator[list[Cell]]:
        yield ["request", "start", "end", "state", "why"]
        for bar in self.bars:
            yield [self.names[bar.row], bar.start, bar.end, bar.state, bar.why]


def shown(charts: Iterable[Chart]) -> list[Chart]:
    """The charts that have something to show."""
    return [chart for chart in charts if not chart.is_empty]
