"""Charts as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

from policylab.sim.report.charts import BOTH, DOTS, STEPS, Bars, Chart, Gantt, Grid, Lines, Series

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 44
ROW = 12  # height of a row in a Gantt chart
SIDE = 30  # margin left and right of the dots
RED = "#aa0000"
LEGEND = 18  # height of a line in the legend
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8a5a00")
"""The colours of Okabe and Ito, which people with colour blindness can distinguish."""
DASHES = ("", "6 3", "2 2", "8 3 2 3")
NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


class Scale(NamedTuple):
    """A linear or logarithmic map from values to coordinates in the picture."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (self._at(each) for each in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _at(self, value: float) -> float:
        return log10(value) if self.is_log else value

    def ticks(self) -> list[float]:
        """About five round values for the ticks of the axis."""
        if self.is_log:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            for each in ((1,), (1, 2, 5)) if len(powers) >= 4 else ((1, 2, 5),):
                found = [step * 10.0**power for power in powers for step in each]
                found = [tick for tick in found if self.low <= tick * 1.0001 and tick <= self.high]
                if len(found) > 2:
                    return found
            # the range is small: use linear ticks
        step = 10.0 ** floor(log10((self.high - self.low) / 4))
        step *= next(n for n in (1, 2, 5, 10) if (self.high - self.low) / (step * n) <= 6)
        first = ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, floor(self.high / step + 1e-9) + 1)]


def labels(ticks: Sequence[float]) -> list[str]:
    """The ticks as text, with enough digits to tell them apart."""
    found = [number(tick) for tick in ticks]
    for digits in range(4, 12):
        if len(set(found)) == len(found):
            break
        found = [f"{tick:.{digits}g}" for tick in ticks]
    return found


def scale(values: Iterable[float], start: float, end: float, *, is_log: bool = False) -> Scale:
    """A scale that maps the range of the values to coordinates from ``start`` to ``end``. The range
    begins at 0 if the smallest value is below 60 % of the largest, unless ``is_log``."""
    known = [value for value in values if isfinite(value) and (value > 0 or not is_log)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if is_log:
        return Scale(low / 1.1, high * 1.1, start, end, True)
    if 0 < low < 0.6 * high:
        low = 0.0
    if low == high:
        low, high = min(0.0, low), max(0.0, high) or 1.0
    return Scale(low, high + 0.03 * (high - low), start, end)


def svg(chart: Chart, *, is_file: bool = False) -> str:
    """The chart as an SVG element; with ``is_file`` as a complete SVG file."""
    height, parts = DRAWN[type(chart)](chart)
    namespace = f" {NAMESPACE}" if is_file else ""
    head = (
        f'<svg{namespace} viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{_safe(chart.title)}" font-family="sans-serif" font-size="11">'
    )
    paper = [f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>'] if is_file else []
    return "\n".join([head, *paper, *parts, "</svg>"])


def _safe(text: str) -> str:
    """The text escaped for XML, with control characters replaced by spaces."""
    return escape("".join(c if c >= " " and c not in "\ufffe\uffff" else " " for c in text))


def number(value: float) -> str:
    """A number as text: with thousands separators from 1,000 on, else with three significant
    digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{_safe(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#dddddd") -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" fill="none"/>'


def _box(x: float, y: float, width: float, height: float, colour: str, text: str = "") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.4, width):.1f}" height="{max(0.0, height):.1f}"'
    title = f"<title>{_safe(text)}</title>" if text else ""
    return f'<rect {size} fill="{colour}">{title}</rect>'


def _legend(names: Sequence[str], top: float, red: str = "") -> tuple[float, list[str]]:
    """The height and SVG elements of a legend at height ``top``: the colour of each series, and the
    text ``red`` on what red lines mean."""
    parts, x, y = [], float(LEFT), top
    for place, name in enumerate(names):
        shown = name if len(name) <= 40 else f"{name[:39]}…"
        width = 24 + 6.8 * len(shown)
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT), y + LEGEND
        parts.append(_box(x, y - 8, 12, 8, colour(place)))
        parts.append(_text(x + 16, y, shown, "start"))
        x += width
    if red:
        y += LEGEND if names else 0
        parts.append(_line(LEFT, y - 4, LEFT + 12, y - 4, RED))
        parts.append(_text(LEFT + 16, y, red if len(red) <= 95 else f"{red[:94]}…", "start"))
    return y + LEGEND - top, parts


def colour(place: int) -> str:
    """The colour of the series at this index."""
    return COLOURS[place % len(COLOURS)]


def _axes(x: Scale | None, y: Scale, x_label: str, y_label: str) -> Iterator[str]:
    floor_at = HEIGHT - BOTTOM
    ticks = y.ticks()
    for tick, text in zip(ticks, labels(ticks), strict=True):
        yield _line(LEFT, y(tick), WIDTH - RIGHT, y(tick))
        yield _text(LEFT - 5, y(tick) + 4, text, "end")
    ticks = x.ticks() if x else []
    for tick, text in zip(ticks, labels(ticks), strict=True):
        yield _line(x(tick), TOP, x(tick), floor_at) if x else ""
        yield _text(x(tick), floor_at + 15, text) if x else ""
    yield _line(LEFT, floor_at, WIDTH - RIGHT, floor_at, "#333333")
    yield _text((LEFT + WIDTH) / 2, floor_at + 32, x_label)
    middle = (TOP + floor_at) / 2
    yield _text(13, middle, y_label, more=f' transform="rotate(-90 13 {middle:g})"')


def _lines(chart: Lines) -> tuple[float, list[str]]:
    points = [
        (x, y, each)
        for each in chart.series
        for x, y in zip(each.x, each.y, strict=True)
        if chart.is_shown(x, y)
    ]
    ends = _near([p[1] for p in points], chart)
    levels = [level.value for level in chart.levels]
    room = SIDE if any(each.mark in (DOTS, BOTH) for each in chart.series) else 0
    x = scale([p[0] for p in points], LEFT + room, WIDTH - RIGHT - room, is_log=chart.log_x)
    tall = [*(p[1] for p in points), *ends, *levels]
    y = scale(tall, HEIGHT - BOTTOM, TOP, is_log=chart.log_y)
    if chart.is_share and not chart.log_y:
        y = y._replace(low=max(0.0, y.low), high=min(1.0, y.high))
    parts = list(_axes(x, y, chart.x_label, chart.y_label))
    for level in chart.levels:
        if chart.is_shown(1.0, level.value):
            parts.append(_line(LEFT, y(level.value), WIDTH - RIGHT, y(level.value), RED))
            parts.append(_text(WIDTH - RIGHT, y(level.value) - 4, level.name, "end"))
    for row, moment in enumerate(chart.moments):
        if x.low <= moment.value <= x.high:
            parts.append(_line(x(moment.value), TOP, x(moment.value), HEIGHT - BOTTOM, RED))
            is_right = x(moment.value) > 0.7 * WIDTH
            at = x(moment.value) + (-3 if is_right else 3)
            parts.append(
                _text(at, TOP + 10 + 12 * row, moment.name, "end" if is_right else "start")
            )
    for place, each in enumerate(chart.series):
        parts += _series(chart, each, place, x, y)
    red = [level.name for level in (*chart.levels, *chart.moments) if level.name]
    text = f"red: {', '.join(dict.fromkeys(red))}" if red else ""
    height, names = _legend([each.name for each in chart.series], HEIGHT + 8, text)
    return HEIGHT + height, parts + names


def _series(chart: Lines, each: Series, place: int, x: Scale, y: Scale) -> Iterator[str]:
    hue = colour(place)
    shift = 0.0
    if chart.is_apart and len(chart.series) > 1:
        number_of = len(chart.series)
        shift = min(7.0, 2 * SIDE / number_of) * (place - (number_of - 1) / 2)
    pairs = [
        (x(a) + shift, y(b)) if chart.is_shown(a, b) else None
        for a, b in zip(each.x, each.y, strict=True)
    ]
    if each.mark != DOTS:
        dash = DASHES[place // len(COLOURS) % len(DASHES)]
        style = f'stroke="{hue}" stroke-width="1.6" stroke-dasharray="{dash}" fill="none"'
        yield f'<path d="{_path(pairs, each.mark == STEPS)}" {style}/>'
    if each.mark in (DOTS, BOTH):
        radius = 3.0 if each.mark == BOTH or chart.is_apart else 2.0
        for pair in filter(None, pairs):
            yield f'<circle cx="{pair[0]:.1f}" cy="{pair[1]:.1f}" r="{radius:g}" fill="{hue}"/>'
    if not chart.is_apart:
        shift = 2.0 * place  # intervals of several lines are moved apart
    for a, low, high in zip(each.x, each.low, each.high, strict=False):
        if chart.is_shown(a, y.high) and low <= high and (isfinite(low) or isfinite(high)):
            yield from _whisker(x(a) + shift, low, high, y, hue)


def _whisker(x: float, low: float, high: float, y: Scale, hue: str) -> Iterator[str]:
    """SVG of a vertical confidence interval at ``x``. An end has a short line, or an arrow if it is
    outside the axis."""
    bottom, top = y(min(y.high, max(y.low, low))), y(max(y.low, min(y.high, high)))
    yield _line(x, bottom, x, top, hue)
    for at, is_cut, back in ((bottom, low < y.low, -5.0), (top, high > y.high, 5.0)):
        if is_cut:
            shape = f"M{x - 3:.1f} {at + back:.1f}L{x:.1f} {at:.1f}L{x + 3:.1f} {at + back:.1f}"
            yield f'<path class="cut" d="{shape}" stroke="{hue}" fill="none"/>'
        else:
            yield _line(x - 2, at, x + 2, at, hue)


def _near(values: Sequence[float], chart: Lines) -> list[float]:
    """Return the ends of all confidence intervals, limited to the surroundings of the plotted
    ``values``, so that far ends do not squeeze the chart."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    room = high - low or abs(high)
    least, most = (low / 2, high * 2) if chart.log_y else (low - room, high + room)
    ends = (end for each in chart.series for end in (*each.low, *each.high))
    return [min(most, max(least, end)) for end in ends if isfinite(end)]


def _path(pairs: Sequence[tuple[float, float] | None], is_stepped: bool) -> str:
    parts: list[str] = []
    is_down = False
    for pair in pairs:
        if pair is None:
            is_down = False
        elif is_down and is_stepped:
            parts.append(f"H{pair[0]:.1f}V{pair[1]:.1f}")
        else:
            parts.append(f"{'L' if is_down else 'M'}{pair[0]:.1f} {pair[1]:.1f}")
        is_down = pair is not None
    return "".join(parts) or "M0 0"


def _bars(chart: Bars) -> tuple[float, list[str]]:
    values = [value for each in chart.bars.values() for value in each]
    levels = [level.value for level in chart.levels]
    y = scale([0.0, *values, *levels], HEIGHT - BOTTOM, TOP)
    parts = list(_axes(None, y, "", chart.y_label))
    room = (WIDTH - RIGHT - LEFT) / max(1, len(chart.groups))
    width = min(40.0, 0.8 * room / max(1, len(chart.bars)))
    for place, group in enumerate(chart.groups):
        middle = LEFT + room * (place + 0.5)
        fits = max(4, int(room / 6))
        shown = group if len(group) <= fits else f"{group[: fits - 1]}…"
        parts.append(_text(middle, HEIGHT - BOTTOM + 15, shown))
        for rank, (name, each) in enumerate(chart.bars.items()):
            if isfinite(value := each[place]):
                left = middle + width * (rank - len(chart.bars) / 2)
                text = f"{group}, {name}: {number(value)}"
                top = y(max(0.0, value))
                tall = abs(y(value) - y(0.0))
                parts.append(_box(left, top, width - 1, tall, colour(rank), text))
                parts.append(_text(left + width / 2, top - 2, number(value), more=' font-size="8"'))
    for level in chart.levels:
        parts.append(_line(LEFT, y(level.value), WIDTH - RIGHT, y(level.value), RED))
        parts.append(_text(WIDTH - RIGHT, y(level.value) - 4, level.name, "end"))
    height, names = _legend(list(chart.bars), HEIGHT + 8)
    return HEIGHT + height, parts + names


def _grid(chart: Grid) -> tuple[float, list[str]]:
    left, floor_at = LEFT + 40, HEIGHT - BOTTOM
    wide = (WIDTH - RIGHT - left) / max(1, len(chart.columns))
    tall = (floor_at - TOP) / max(1, len(chart.lines))
    known = [value for values in chart.values for value in values if isfinite(value) and value > 0]
    low, high = log10(min(known, default=1.0)), log10(max(known, default=1.0))
    parts = []
    for place, (name, values) in enumerate(zip(chart.lines, chart.values, strict=True)):
        y = floor_at - tall * (place + 1)
        parts.append(_text(left - 5, y + tall / 2 + 4, name, "end"))
        for column, value in enumerate(values):
            if not isfinite(value):
                continue
            share = (log10(value) - low) / (high - low) if value > 0 and high > low else 0.0
            red, green, blue = (round(255 - share * part) for part in (25, 150, 215))
            shade = f"#{red:02x}{green:02x}{blue:02x}"
            x = left + wide * column
            text = f"{chart.columns[column]}, {name}: {number(value)}"
            parts.append(_box(x + 1, y + 1, wide - 2, tall - 2, shade, text))
            parts.append(_text(x + wide / 2, y + tall / 2 + 4, number(value)))
    for column, name in enumerate(chart.columns):
        parts.append(_text(left + wide * (column + 0.5), floor_at + 15, name))
    parts.append(_text((left + WIDTH) / 2, floor_at + 32, chart.x_label))
    middle = (TOP + floor_at) / 2
    turned = f' transform="rotate(-90 13 {middle:g})"'
    parts.append(_text(13, middle, chart.y_label, more=turned))
    return HEIGHT, parts


def _gantt(chart: Gantt) -> tuple[float, list[str]]:
    floor_at = TOP + ROW * len(chart.names)
    times = [time for bar in chart.bars for time in (bar.start, bar.end)]
    x = scale(times, LEFT + 20, WIDTH - RIGHT)
    parts = []
    for tick in x.ticks():
        parts.append(_line(x(tick), TOP, x(tick), floor_at))
        parts.append(_text(x(tick), floor_at + 15, number(tick)))
    for place, name in enumerate(chart.names):
        shown = name if len(name) <= 12 else f"{name[:11]}…"
        parts.append(_text(LEFT + 15, TOP + ROW * (place + 1) - 3, shown, "end"))
    for bar in chart.bars:
        hue = colour(chart.states.index(bar.state))
        why = f": {bar.why}" if bar.why else ""
        text = f"{chart.names[bar.row]} {bar.state}{why}, {bar.start:.3f} to {bar.end:.3f} s"
        left, wide = x(bar.start), x(bar.end) - x(bar.start)
        parts.append(_box(left, TOP + ROW * bar.row + 1, wide, ROW - 2, hue, text))
    parts.append(_text((LEFT + WIDTH) / 2, floor_at + 32, "seconds since the start of the run"))
    height, names = _legend(chart.states, floor_at + 50)
    return floor_at + 44 + height, parts + names


Draw = Callable[[Chart], tuple[float, list[str]]]
DRAWN: dict[type[Chart], Draw] = {Lines: _lines, Bars: _bars, Grid: _grid, Gantt: _gantt}  # type: ignore[dict-item]
