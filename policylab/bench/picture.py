"""A picture of a run: latencies and rates by time, and how latencies are distributed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from policylab.bench.client import Row
from policylab.bench.figures import values_of
from policylab.bench.loops import Played
from policylab.sim.report.charts import DOTS, STEPS, Chart, Lines, Series
from policylab.sim.report.svg import NAMESPACE, WIDTH, svg

BINS = 120  # of the time of a run
POINTS = 400  # of a distribution
TITLE = 24  # height


def picture(played: Played, *, is_closed: bool, title: str) -> str:
    """An SVG file."""
    whole = [row for row in played.rows if row.is_whole]
    starts = [row.sent if is_closed else row.due for row in whole]
    charts = [_first_tokens(played, whole, starts), *_rates(played), *_shares(whole, starts)]
    parts, heights = [], [0.0, 0.0]
    for place, chart in enumerate(charts):
        drawn = svg(chart)
        match = re.search(r'viewBox="0 0 \d+ ([\d.]+)"', drawn)
        height = float(match[1]) if match else 0.0
        column = place % 2
        at = f'x="{column * WIDTH}" y="{heights[column] + TITLE:g}"'
        parts.append(_heading(chart.title, column * WIDTH, heights[column] + TITLE - 8))
        parts.append(drawn.replace("<svg ", f'<svg {at} width="{WIDTH}" height="{height:g}" ', 1))
        heights[column] += height + TITLE
    size = f"0 0 {2 * WIDTH} {max(heights):g}"
    head = f'<svg {NAMESPACE} viewBox="{size}" role="img" aria-label="{_plain(title)}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"])


def _heading(text: str, x: float, y: float) -> str:
    style = 'font-family="sans-serif" font-size="13" font-weight="bold"'
    return f'<text x="{x + 64:g}" y="{y:g}" {style}>{_plain(text)}</text>'


def _plain(text: str) -> str:
    return re.sub(r'[<>&"\x00-\x1f]', " ", text)


def _first_tokens(played: Played, rows: Sequence[Row], starts: Sequence[float]) -> Lines:
    x = [start - played.start for start in starts]
    y = [row.times[0] - start for row, start in zip(rows, starts, strict=True)]
    return Lines(
        key="first",
        title="Time to first token, by when the request began",
        caption="",
        x_label="seconds",
        y_label="seconds to first token",
        series=[Series(name="first token", x=x, y=y, mark=DOTS)],
    )


def _rates(played: Played) -> list[Chart]:
    span = max(1e-6, played.end - played.start) / BINS
    counts = Counter(
        int((moment - played.start) / span) for row in played.rows for moment in row.times
    )
    x = [span * place for place in range(BINS)]
    sent = np.sort([row.sent for row in played.rows])
    ended = np.sort([row.ended for row in played.rows])
    moments = np.array(x) + played.start
    running = np.searchsorted(sent, moments) - np.searchsorted(ended, moments)
    tokens = [counts[at] / span for at in range(BINS)]
    shown = {"tokens per second": tokens, "running requests": running.tolist()}
    return [
        Lines(
            key=name,
            title=name.capitalize(),
            caption="",
            x_label="seconds",
            y_label=name,
            series=[Series(name=name, x=x, y=y, mark=STEPS)],
        )
        for name, y in shown.items()
    ]


def _shares(rows: Sequence[Row], starts: Sequence[float]) -> list[Chart]:
    """The distributions: of times to first and last token, and of times between tokens."""
    values = values_of(rows, starts)
    names = {"first": ("ttft", "e2el"), "between": ("tpot", "itl")}
    titles = {"first": "Times to first and last token", "between": "Times between tokens"}
    shares = np.linspace(0.0, 1.0, POINTS)
    return [
        Lines(
            key=key,
            title=f"{titles[key]}: share of all up to",
            caption="",
            x_label="milliseconds",
            y_label="share",
            log_x=True,
            is_share=True,
            series=[
                Series(
                    name=name.upper(),
                    x=(1e3 * np.quantile(values[name].values, shares)).tolist(),
                    y=shares.tolist(),
                )
                for name in some
                if len(values[name].values)
            ],
        )
        for key, some in names.items()
    ]
