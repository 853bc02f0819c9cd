"""Show what a running core or server does, in a table that is refreshed each second."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.cli.readings import CoreSource, EngineReading, ReadingSource, ServerSource
from engine.config.env import API_KEY, CORE_SECRET, admin_api_key, api_keys, core_secret
from engine.errors import ConfigError
from engine.messages.stats import AdapterUse, RankUse, SchedulerStats, StoreUse
from engine.observe.stats_log import roofline_share

INTERVAL = 1.0
SHORTEST_INTERVAL = 0.1
WINDOW = 5  # intervals that rates are averaged over
MOST_ADAPTERS = 5  # with rows of their own
MIB = 1 << 20
SILENT = 3  # intervals without an answer after which the table says so

# Counters that are shown only once they are above 0.
RARE = {
    "num_failed": "requests failed",
    "num_refused": "requests refused",
    "num_expired": "requests expired",
    "num_rescued_steps": "steps rescued from the policy",
    "num_policy_faults": "policy faults",
    "num_cache_resets": "prefix cache resets",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "--connect",
        metavar="ADDRESS",
        help="address that `metronome core` printed; tcp:// addresses need the secret in "
        f"{CORE_SECRET}",
    )
    group.add_argument(
        "--url", metavar="URL", help="address of `metronome serve`: http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"for --url, if the server requires one; or set {API_KEY}"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=INTERVAL,
        metavar="S",
        help=f"seconds between two readings, {SHORTEST_INTERVAL:g} or more (default: {INTERVAL:g})"
        f"; rates are over the last {WINDOW} of these",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table, measured over one interval, and exit"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line instead of a table"
    )


def run(parsed: argparse.Namespace) -> int:
    if not SHORTEST_INTERVAL <= parsed.interval <= 3600:
        raise ConfigError(
            f"--interval is {parsed.interval:g}, must be from {SHORTEST_INTERVAL:g} to 3600 seconds"
        )
    with closing(_source(parsed)) as source:
        screen = Screen(source.name, parsed.interval)
        if parsed.once:
            for _ in readings(source, parsed.interval, screen, most=2):
                pass
            _print(screen, parsed.json)
            return 0
        try:
            with _ended_by_sigterm():
                _watch(source, screen, parsed)
        except KeyboardInterrupt:  # the normal way to quit
            return 0
    return 0


def _source(parsed: argparse.Namespace) -> ReadingSource:
    if parsed.connect is not None:
        if parsed.api_key is not None:
            raise ConfigError(
                "--api-key is given with --connect: leave it out, only a server (--url) has keys"
            )
        return CoreSource(parsed.connect, core_secret())
    keys = [parsed.api_key, *api_keys(), admin_api_key()]
    return ServerSource(parsed.url, next(filter(None, keys), None))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the terminal gets its cursor back."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def readings(
    source: ReadingSource, interval: float, screen: Screen, most: int | None = None
) -> Iterator[None]:
    """Add a reading to the screen every ``interval`` seconds, at most ``most`` times, and yield
    after each."""
    while True:
        begun = time.monotonic()
        screen.add(source.read())
        yield
        most = None if most is None else most - 1
        if most == 0:
            return
        rest = interval - (time.monotonic() - begun)
        time.sleep(rest if rest > 0 else interval)


def _watch(source: ReadingSource, screen: Screen, parsed: argparse.Namespace) -> None:
    """Show readings until the user or the engine ends."""
    console = Console(markup=False, highlight=False)  # causes may contain brackets
    if parsed.json or not console.is_terminal:
        for _ in readings(source, parsed.interval, screen):
            if screen.has_rates:
                _print(screen, parsed.json)
        return
    # Live draws in its own thread, so the table can show that a core does not answer.
    with Live(get_renderable=screen.render, console=console, refresh_per_second=2) as live:
        for _ in readings(source, parsed.interval, screen):
            live.refresh()


def _print(screen: Screen, as_json: bool) -> None:
    if as_json:
        print(json.dumps(screen.figures.as_dict()), flush=True)
        return
    # A pipe has no width: do not cut lines.
    width = None if sys.stdout.isatty() else 200
    Console(width=width, markup=False, highlight=False).print(screen.render())
    sys.stdout.flush()


class Screen:
    """Keeps the readings of the last intervals and renders them as a table."""

    def __init__(self, name: str, interval: float) -> None:
        self._name = name
        self._interval = interval
        self._readings: tuple[EngineReading, ...] = ()  # immutable: another thread renders it

    def add(self, reading: EngineReading) -> None:
        kept = self._readings
        if kept and reading.stats.num_steps < kept[-1].stats.num_steps:  # the core was restarted
            kept = ()
        self._readings = (*kept, reading)[-WINDOW - 1 :]

    @property
    def has_rates(self) -> bool:
        return len(self._readings) > 1

    @property
    def figures(self) -> LiveFigures:
        readings = self._readings
        return LiveFigures(readings[0], readings[-1])

    def render(self) -> RenderableType:
        """Return the table, followed by warnings."""
        if not self._readings:
            return Text(f"{self._name}: waiting for the first answer")
        figures = self.figures
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        table.add_column(f"last {round(figures.seconds, 1):g} s", justify="right")
        table.add_column("since its start", justify="right")
        for row in rows(figures):
            table.add_row(*row)
        return Group(Text(self._name), table, *map(Text, self._remarks(figures)))

    def _remarks(self, figures: LiveFigures) -> Iterator[str]:
        silent = time.monotonic() - figures.last.time
        if silent > SILENT * self._interval:
            yield f"no answer for {silent:.0f} s: the core is in a long step, or hangs"
        if not figures.last.is_fresh:
            yield "the core does not answer its server: these are its last figures"
        if figures.stats.blocked:
            yield f"blocked: {figures.stats.blocked}"


class LiveFigures(NamedTuple):
    """The readings at the begin and end of a window, and the differences between them."""

    first: EngineReading
    last: EngineReading

    @property
    def stats(self) -> SchedulerStats:
        return self.last.stats

    @property
    def seconds(self) -> float:
        return self.last.time - self.first.time

    def growth(self, name: str) -> float:
        """Return how much a counter of the scheduler has grown in the window."""
        return float(getattr(self.last.stats, name) - getattr(self.first.stats, name))

    def growth_by_key(self, name: str) -> dict[str, float]:
        """Return how much a counter has grown in the window, for each of its keys."""
        now, before = getattr(self.last.stats, name), getattr(self.first.stats, name)
        return {key: value - before.get(key, 0) for key, value in now.items()}

    def rate(self, growth: float | None) -> float | None:
        """Convert a growth in the window to a rate per second; ``None`` if the value is not
        counted."""
        if growth is None:
            return None
        return growth / self.seconds if self.seconds > 0 else 0.0

    @property
    def generated(self) -> int | None:
        return _difference(self.last.generated, self.first.generated)

    @property
    def prompts(self) -> int | None:
        return _difference(self.last.prompts, self.first.prompts)

    @property
    def ranks(self) -> list[RankUse]:
        """What each rank has spent its time with in the window, or since its core was started
        again."""
        before = {(use.core, use.rank): use for use in self.first.stats.ranks}
        return [since(use, before.get((use.core, use.rank))) for use in self.stats.ranks]

    @property
    def hits(self) -> float | None:
        """The fraction (0 to 1) of looked-up prompt tokens that were in the prefix cache."""
        return _share(self.growth("prefix_hits"), self.growth("prefix_queries"))

    @property
    def hits_in_all(self) -> float | None:
        return _share(self.stats.prefix_hits, self.stats.prefix_queries)

    def as_dict(self) -> dict[str, Any]:
        """Return gauges, rates per second, growth in the window, and totals since the start."""
        stats = self.stats
        return {
            "seconds": self.seconds,
            "is_fresh": self.last.is_fresh,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "parked": stats.num_parked,
            "waiting_by_cause": stats.waiting_by_cause,
            "kv_usage": stats.kv_usage,
            "kv_groups": [msgspec.structs.asdict(group) for group in stats.kv_groups],
            "cores": self.last.cores,
            "stores": {name: msgspec.structs.asdict(use) for name, use in stats.stores.items()},
            "ranks": [msgspec.structs.asdict(use) for use in self.ranks],
            "adapters": None if stats.adapters is None else msgspec.structs.asdict(stats.adapters),
            "state_snapshots": stats.num_snapshots,
            "state_snapshot_usage": stats.snapshot_usage,
            "blocked": stats.blocked,
            "steps_per_second": self.rate(self.growth("num_steps")),
            "computed_tokens_per_second": self.rate(self.growth("num_scheduled_tokens")),
            "generated_tokens_per_second": self.rate(self.generated),
            "prompt_tokens_per_second": self.rate(self.prompts),
            "prefix_hit_ratio": self.hits,
            "prefix_missed": self.growth_by_key("prefix_missed"),
            "preemptions": int(self.growth("num_preemptions")),
            "wait_seconds": self.growth_by_key("wait_seconds"),
            "hook_seconds": self.growth_by_key("hook_seconds"),
            "counters": self.growth_by_key("counters"),
            "total": {
                "steps": stats.num_steps,
                "computed_tokens": stats.num_scheduled_tokens,
                "generated_tokens": self.last.generated,
                "prompt_tokens": self.last.prompts,
                "prefix_hit_ratio": self.hits_in_all,
                "prefix_missed": dict(stats.prefix_missed),
                "preemptions": stats.num_preemptions,
                "ranks": [msgspec.structs.asdict(use) for use in stats.ranks],
                "wait_seconds": dict(stats.wait_seconds),
                "hook_seconds": dict(stats.hook_seconds),
                "counters": dict(stats.counters),
                **{name.removeprefix("num_"): getattr(stats, name) for name in RARE},
            },
        }


def since(use: RankUse, before: RankUse | None) -> RankUse:
    """What a rank has spent its time with after ``before``. Counts that are smaller now are those
    of a core that was started again."""
    if before is None or before.step_seconds > use.step_seconds:
        return use
    names = ("step_seconds", "wait_seconds", "stage_wait_seconds")
    news = (getattr(use, name) - getattr(before, name) for name in names)
    return RankUse(use.core, use.rank, *news)


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


Row = tuple[str, str, str]


def rows(figures: LiveFigures) -> Iterator[Row]:
    """Yield the table's rows: name, value now or in the window, total since the start."""
    stats = figures.stats
    yield from _cores(figures.last.cores)
    yield from _ranks(figures)
    yield "requests running", str(stats.num_running), ""
    yield "requests waiting", str(stats.num_waiting), ""
    yield "requests parked", str(stats.num_parked), ""
    for cause in _largest(stats.waiting_by_cause):
        yield f"waiting now for {cause}", f"{stats.waiting_by_cause[cause]:,}", ""
    yield "KV in use", f"{100 * stats.kv_usage:.1f} %", ""
    yield from _groups(stats)
    if stats.has_snapshots:
        yield "snapshots of states", f"{stats.num_snapshots:,}", ""
        yield "KV blocks in snapshots", f"{100 * stats.snapshot_usage:.1f} %", ""
    yield from _stores(stats.stores)
    yield from _adapters(stats.adapters)
    yield "prefix hits", _percent(figures.hits), _percent(figures.hits_in_all)
    yield from _missed(figures)
    yield "steps/s", _number(figures.rate(figures.growth("num_steps"))), f"{stats.num_steps:,}"
    computed = figures.rate(figures.growth("num_scheduled_tokens"))
    yield "tokens computed/s", _number(computed), f"{stats.num_scheduled_tokens:,}"
    if figures.last.generated is not None:
        total = f"{figures.last.generated:,}"
        yield "tokens generated/s", _number(figures.rate(figures.generated)), total
    if figures.last.prompts is not None:
        total = f"{figures.last.prompts:,}"
        yield "prompt tokens/s", _number(figures.rate(figures.prompts)), total
    yield _counted(figures, "num_preemptions", "preemptions")
    yield from (
        _counted(figures, name, word) for name, word in RARE.items() if getattr(stats, name)
    )
    yield from _events(figures)
    share = roofline_share(figures.growth("floor_seconds"), figures.growth("step_seconds"))
    if share is not None:
        yield "steps, of the roofline", f"{100 * share:.0f} %", ""
    yield from _waits(figures)
    yield from _hooks(figures)


def _groups(stats: SchedulerStats) -> Iterator[Row]:
    """Yield a row for each window of a model with sliding windows: the KV blocks in use in all
    groups of layers with this window. The row of full attention comes first."""
    if [group.window for group in stats.kv_groups] in ([], [0]):
        return
    for kind in dict.fromkeys((group.attention, group.window) for group in stats.kv_groups):
        same = [
            each.num_blocks for each in stats.kv_groups if (each.attention, each.window) == kind
        ]
        layers = f"{kind[0]} attention" + (f" of {kind[1]:,} tokens" if kind[1] else "")
        groups = f", {len(same)} groups" if len(same) > 1 else ""
        yield f"KV blocks, {layers}{groups}", f"{sum(same):,}", ""


def _cores(cores: Mapping[str, tuple[int, int]]) -> Iterator[Row]:
    """Yield a row for the cores of each role, if there are several."""
    for role, (alive, total) in cores.items():
        if role or total > 1:
            yield f"{role} cores".strip(), f"{alive} of {total}", ""


def _ranks(figures: LiveFigures) -> Iterator[Row]:
    """Yield a row for each rank: the share of its steps in which it waited for other ranks, and a
    row for each stage of a pipeline that waited for another one."""
    has_many = len({use.core for use in figures.stats.ranks}) > 1
    for now, total in zip(figures.ranks, figures.stats.ranks, strict=True):
        name = f"core {total.core}, rank {total.rank}" if has_many else f"rank {total.rank}"
        for waited, others in (("wait_seconds", "ranks"), ("stage_wait_seconds", "stages")):
            if others == "ranks" or getattr(total, waited):
                in_window, in_all = (
                    _percent(_share(getattr(use, waited), use.step_seconds)) for use in (now, total)
                )
                yield f"{name} waits for other {others}", in_window, in_all


def _stores(uses: Mapping[str, StoreUse]) -> Iterator[Row]:
    """Yield a row for each store of KV blocks."""
    for name, use in uses.items():
        left_out = "" if use.num_cores else ", not used"
        size = f"{use.num_bytes / MIB:,.1f} MiB{left_out}"
        yield f"KV store {name}", f"{use.num_blocks:,} blocks, {size}", ""


def _adapters(use: AdapterUse | None) -> Iterator[Row]:
    """Yield the rows of an engine with LoRA adapters, and one for each of the adapters with the
    most requests."""
    if use is None:
        return
    yield "adapters in slots", f"{use.num_slots_used} of {use.num_slots}", ""
    yield "adapters in memory", f"{use.num_host_copies}, {use.host_bytes / MIB:,.1f} MiB", ""
    total = Counter(use.running) + Counter(use.waiting)
    for name, _ in total.most_common(MOST_ADAPTERS):
        running, waiting = use.running.get(name, 0), use.waiting.get(name, 0)
        yield f"adapter {name}", f"{running} running, {waiting} waiting", ""


def _missed(figures: LiveFigures) -> Iterator[Row]:
    """Yield a row for each reason why prompt tokens were not found in the prefix cache: the number
    of tokens over the window and in total. The largest total comes first."""
    growth, total = figures.growth_by_key("prefix_missed"), figures.stats.prefix_missed
    for reason in _largest(total):
        yield f"prompt tokens not cached: {reason}", f"{growth[reason]:,.0f}", f"{total[reason]:,}"


def _counted(figures: LiveFigures, name: str, word: str) -> Row:
    return word, f"{figures.growth(name):.0f}", f"{getattr(figures.stats, name):,}"


def _events(figures: LiveFigures) -> Iterator[Row]:
    """Yield a row for each counter of features and policies that is not zero, sorted by name."""
    growth, total = figures.growth_by_key("counters"), figures.stats.counters
    for name in sorted(name for name, value in total.items() if value):
        yield f"{name}/s", _number(figures.rate(growth[name])), f"{total[name]:,}"


def _waits(figures: LiveFigures) -> Iterator[Row]:
    """Yield a row for each cause of waiting: the seconds that requests waited for that cause in the
    window and in total. The largest total comes first."""
    growth, total = figures.growth_by_key("wait_seconds"), figures.stats.wait_seconds
    for cause in _largest(total):
        yield f"waited for {cause}", _seconds(growth[cause]), _seconds(total[cause])


def _hooks(figures: LiveFigures) -> Iterator[Row]:
    """Yield a row for each hook of the policy: the fraction of the window's time spent in the hook,
    and its seconds since the start. The slowest hook comes first."""
    growth, total = figures.growth_by_key("hook_seconds"), figures.stats.hook_seconds
    for hook in _largest(total):
        yield f"in {hook}", _percent(figures.rate(growth[hook])), _seconds(total[hook])


def _largest(amounts: Mapping[str, float]) -> list[str]:
    return sorted(amounts, key=lambda key: (-amounts[key], key))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s"
