"""Measures a run: times of tokens, processor seconds, memory, and the load of other programs.

Reads /proc and imports nothing else, so that it works in every engine's environment.
"""

import itertools
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workloads import Arrival

HERTZ = os.sysconf("SC_CLK_TCK")
MIB = 1024
# A lone request's first tokens and its last ones are not steady decode.
STEADY_FROM, STEADY_UNTIL = 8, -3


def process_tree(root: int | None = None) -> list[int]:
    """Process ids of `root` (this process) and of all that it started."""
    found, todo = [], [root or os.getpid()]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            todo += map(int, _read(children).split())
    return found


def cpu_seconds() -> float:
    """User and system time of this process tree, ended children included; of this process to the
    nanosecond, of others in ticks."""
    ended = os.times()
    own = time.process_time() + ended.children_user + ended.children_system
    return own + cpu_of(process_tree()[1:])


def cpu_of(pids: Iterable[int]) -> float:
    """User and system time of processes and of their ended children, in ticks."""
    ticks = 0
    for pid in pids:
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return float(ticks / HERTZ)


@dataclass(frozen=True)
class Usage:
    """Processor seconds until now, to be compared by ``since``."""

    own: float  # this process tree
    machine: float  # all processes
    steal: float  # taken by the host of a virtual machine

    @classmethod
    def now(cls) -> "Usage":
        user, nice, system, _, _, irq, softirq, steal = (
            int(ticks) / HERTZ for ticks in _read(Path("/proc/stat")).split("\n", 1)[0].split()[1:9]
        )
        return cls(cpu_seconds(), user + nice + system + irq + softirq, steal)

    def since(self, before: "Usage") -> dict[str, float]:
        own, steal = self.own - before.own, self.steal - before.steal
        others = max(0.0, self.machine - before.machine - own)
        return {"cpu_s": round(own, 4), "others_s": round(others, 2), "steal_s": round(steal, 2)}


def memory() -> dict[str, float]:
    """Proportional and peak resident memory of the process tree in MiB, and its size."""
    pids = process_tree()
    return {
        "pss_mib": sum(_field(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in pids) // MIB,
        "peak_rss_mib": sum(_field(f"/proc/{pid}/status", "VmHWM:") for pid in pids) // MIB,
        "processes": len(pids),
    }


def _field(path: str, label: str) -> int:
    lines = _read(Path(path)).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(label)), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended meanwhile
        return ""


def quantile(values: Iterable[float], share: float, default: float = math.nan) -> float:
    """The value that this share of the values do not exceed; the default without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else default


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, whatever the distribution: two of the values, by rank.

    With fewer than six values, the least and the most are returned, which hold less than that.
    """
    ordered, num = sorted(values), len(values)
    below, rank = 0.0, 0  # chance that no more than `rank` values lie below the median
    while (below := below + math.comb(num, rank) / 2**num) <= 0.025:
        rank += 1
    rank = max(0, rank - 1)
    return ordered[rank], ordered[num - 1 - rank]


@dataclass
class Timeline:
    """When each token of each request appeared, on one clock."""

    arrivals: Sequence[Arrival]
    start: float
    tokens: list[list[float]] = field(default_factory=list)
    steady_cpu: tuple[int, float] | None = None
    """Tokens and processor seconds until the first moment of steady decode."""

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in self.arrivals]

    def note(self, index: int, num_tokens: int, now: float) -> None:
        """Note that request `index` has `num_tokens` tokens by now."""
        seen = self.tokens[index]
        seen += [now] * (num_tokens - len(seen))

    def note_cpu(self) -> None:
        """Note the processor seconds until now if steady decode has just begun."""
        if self.steady_cpu is None and min(map(len, self.tokens)) > STEADY_FROM:
            self.steady_cpu = sum(map(len, self.tokens)), cpu_seconds()

    def steady_cpu_rate(self) -> float:
        """Tokens for each processor second of steady decode; called at the end of the run. 0 for a
        run without steady decode."""
        if self.steady_cpu is None:
            return 0.0
        count, seconds = self.steady_cpu
        num_made = sum(map(len, self.tokens)) - count
        return num_made / (cpu_seconds() - seconds) if num_made else 0.0

    def check(self) -> None:
        """Raise ``ValueError`` for a request with too few tokens: its engine would look fast."""
        counts = [len(times) for times in self.tokens]
        wanted = [arrival.num_output for arrival in self.arrivals]
        if counts != wanted:
            raise ValueError(f"the engine returned {counts} tokens instead of {wanted}")

    def summary(self) -> dict[str, float]:
        """Throughput in tokens a second, latencies in milliseconds."""
        self.check()
        end = max(times[-1] for times in self.tokens)
        wall = end - self.start
        num_output = sum(arrival.num_output for arrival in self.arrivals)
        num_input = sum(len(arrival.prompt) for arrival in self.arrivals)
        first = [
            times[0] - self.start - arrival.seconds
            for arrival, times in zip(self.arrivals, self.tokens, strict=True)
        ]
        each = [
            (times[-1] - times[0]) / (len(times) - 1) for times in self.tokens if len(times) > 1
        ]
        gaps = [b - a for times in self.tokens for a, b in itertools.pairwise(times)]
        return {
            "wall_s": round(wall, 4),
            "output_tok_s": round(num_output / wall, 2),
            "total_tok_s": round((num_output + num_input) / wall, 2),
            "steady_tok_s": round(self.steady_rate(), 2),
            "steady_tok_cpu_s": round(self.steady_cpu_rate(), 2),
            "ttft_ms_p50": _milliseconds(quantile(first, 0.5)),
            "ttft_ms_p95": _milliseconds(quantile(first, 0.95)),
            "ttft_ms_max": _milliseconds(max(first)),
            "tpot_ms_p50": _milliseconds(statistics.median(each)) if each else 0.0,
            "tpot_ms_p95": _milliseconds(quantile(each, 0.95)),
            "itl_ms_p50": _milliseconds(quantile(gaps, 0.5)),
            "itl_ms_p99": _milliseconds(quantile(gaps, 0.99)),
        }

    def steady_rate(self) -> float:
        """Tokens a second while every request of the run decodes; 0 if there is no such time."""
        begin = max(times[min(STEADY_FROM, len(times) - 1)] for times in self.tokens)
        end = min(times[max(STEADY_UNTIL, -len(times))] for times in self.tokens)
        if end <= begin:
            return 0.0
        count = sum(begin < now <= end for times in self.tokens for now in times)
        return count / (end - begin)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)
