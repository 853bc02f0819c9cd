"""Shows the figures of a run as a table, and keeps them in a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.errors import ConfigError
from policylab.bench.client import Row
from policylab.bench.figures import METRICS

MOST_USERS = 10  # rows of the table of users
PIPED_WIDTH = 1000  # characters; where no terminal is, nothing is cut
BUSY = 0.7  # of a processor: more may delay what is measured
PROGRESS_SECONDS = 1.0
COUNTS = (
    ("completed", "requests completed", "{:,}"),
    ("failed", "requests failed", "{:,}"),
    ("unfinished", "requests that had not ended", "{:,}"),
    ("unsent", "requests that were never sent", "{:,}"),
    ("duration", "seconds", "{:,.2f}"),
    ("total_input_tokens", "input tokens", "{:,}"),
    ("total_cached_tokens", "of them from the prefix cache", "{:,}"),
    ("total_output_tokens", "output tokens", "{:,}"),
    ("request_throughput", "requests per second", "{:,.3f}"),
    ("output_throughput", "output tokens per second", "{:,.1f}"),
    ("total_token_throughput", "all tokens per second", "{:,.1f}"),
    ("max_output_tokens_per_s", "output tokens in the best second", "{:,.0f}"),
    ("max_concurrent_requests", "most requests at a time", "{:,}"),
    ("longest_silence_ms", "longest time without any token, ms", "{:,.1f}"),
)
HIDDEN_IF_ZERO = ("failed", "unfinished", "unsent", "total_cached_tokens")


class Progress:
    """A line on standard error that counts what has ended; nothing where no terminal is."""

    def __init__(self, number: int | None, *, is_shown: bool) -> None:
        self._of = "" if number is None else f" of {number}"
        self._is_shown = is_shown and sys.stderr.isatty()
        self._next = 0.0

    def __call__(self, rows: Sequence[Row], start: float) -> None:
        now = time.perf_counter()
        if not self._is_shown or now < self._next:
            return
        self._next = now + PROGRESS_SECONDS
        ended = [row for row in rows if row.how]
        failed = sum(bool(row.error) for row in ended)
        running = sum(bool(row.sent) for row in rows) - len(ended)
        line = f"{now - start:.0f} s: {len(ended)}{self._of} ended, {running} running"
        print(f"\r{line}, {failed} failed ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._is_shown:
            print(file=sys.stderr)


def show(found: Mapping[str, Any], percentiles: Sequence[float]) -> None:
    """Print the figures of a run, errors by kind and what the client itself took."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    counts = Table("figure", "value", title="bench serve")
    counts.columns[1].justify = "right"
    for name, text, form in COUNTS:
        if found[name] or name not in HIDDEN_IF_ZERO:
            counts.add_row(text, form.format(found[name]))
    if found["request_goodput"] is not None:
        low, high = found["intervals"]["request_goodput"]
        value = f"{found['request_goodput']:,.3f} ({low:,.3f} to {high:,.3f})"
        counts.add_row("requests per second that kept their promises", value)
        kept, promised = found["promises_kept"], found["promised"]
        share = f"{kept:,} of {promised:,} ({100 * kept / promised:.4g} %)"
        counts.add_row("promises kept", share)
    console.print(counts)
    if found["completed"]:
        console.print(_latencies(found, percentiles))
    if 0 < len(found["by_user"]) <= MOST_USERS:
        console.print(_users(found["by_user"]))
    for kind, number in found["errors_by_kind"].items():
        console.print(f"{number:,} x {kind}", style="red", highlight=False, markup=False)
    late = ""
    if found["max_concurrency"] is None:
        late = (
            f"; 99 % of requests were sent within {found['client_lag_p99_ms']:.1f} ms of their time"
        )
    console.print(
        f"client: {found['client_cpu_us_per_token']:.1f} us of processor time per output token, "
        f"{100 * found['client_cpu_share']:.1f} % of one processor{late}",
        highlight=False,
        soft_wrap=True,
    )
    if found["client_cpu_share"] > BUSY:
        console.print("the client was busy: its own delays may be part of the latencies")
    if found["interrupted"]:
        console.print("interrupted: these are the figures up to then")


def _latencies(found: Mapping[str, Any], percentiles: Sequence[float]) -> Table:
    names = ["mean", "median", *(f"p{each:g}" for each in percentiles if each != 50)]
    table = Table("ms", *names, title="latencies, with 95 % intervals")
    for column in table.columns[1:]:
        column.justify = "right"
    for metric in METRICS:
        cells = []
        for name in names:
            key = f"{name}_{metric}_ms"
            if key in found:
                low, high = found["intervals"][key]
                cells.append(f"{found[key]:,.1f} ({low:,.1f}–{high:,.1f})")
        if cells:
            table.add_row(metric, *cells)
    return table


def _users(by_user: Mapping[str, Mapping[str, float]]) -> Table:
    """Times to the first token of each user."""
    names = list(dict.fromkeys(name for figures in by_user.values() for name in figures))
    table = Table("user", *(name.removesuffix("_ttft_ms") for name in names), title="ttft, ms")
    for column in table.columns[1:]:
        column.justify = "right"
    for user, figures in by_user.items():
        cells = [figures.get(name) for name in names]
        shown = [
            "" if each is None else f"{each:,}" if isinstance(each, int) else f"{each:,.1f}"
            for each in cells
        ]
        table.add_row(user or "(none)", *shown)
    return table


def details(rows: Sequence[Row], start: float) -> dict[str, list[Any]]:
    """Figures of each request, for ``--save-detailed``; times are in seconds."""
    return {
        "input_lens": [row.num_input or row.about.num_prompt for row in rows],
        "output_lens": [row.num_tokens for row in rows],
        "start_times": [row.sent - start for row in rows],
        "queue_times": [row.sent - row.due for row in rows],
        "ttfts": [row.times[0] - row.sent if row.times else 0.0 for row in rows],
        "itls": [row.gaps for row in rows],
        "latencies": [row.times[-1] - row.sent if row.times else 0.0 for row in rows],
        "generated_texts": ["".join(row.text) for row in rows],
        "errors": [row.error for row in rows],
        "users": [row.about.user for row in rows],
    }


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """Write a file of JSON. Raises ``ConfigError`` if that is impossible."""
    text = json.dumps({name: _plain(value) for name, value in found.items()}, indent=1)
    write(path, text + "\n")


def write(path: Path, text: str) -> None:
    """Write a file, and the folders of its path. Raises ``ConfigError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def _plain(value: Any) -> Any:
    return "inf" if value == inf else value
