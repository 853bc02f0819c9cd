"""Figures of a run: latencies with intervals, rates, promises kept, errors by kind.

Latencies of one run are not independent: requests next to each other share a queue. So intervals
come from a bootstrap of blocks of consecutive requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from policylab.bench.client import LEFT, Row
from policylab.bench.loops import Played
from policylab.sim.job import Job

Floats = NDArray[np.float64]
METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to the first token, per output token after it, between tokens, and to the last token."""
GOODPUT_EXAMPLE = "--goodput ttft:500 tpot:50"
LEVEL = 0.95
RESAMPLES = 500
MOST_DRAWN = 100_000_000  # values in all resamples of a metric
ITL_SHARE = 0.99


class Values(NamedTuple):
    """Values of a metric in seconds, and for each the index of its request [values]."""

    values: Floats
    owners: NDArray[np.int64]


@dataclass(frozen=True)
class Promises:
    """Upper limits in seconds of a request's latencies, by metric; of ``itl`` 99 % of its gaps."""

    limits: dict[str, float]

    def are_kept(self, row: Row, start: float) -> bool:
        """Whether a request that began at ``start`` came to its end within the limits."""
        if not row.is_whole:
            return False
        times = latencies(row, start)
        return all(times[name] <= most for name, most in self.limits.items())


def read_promises(pairs: Sequence[str]) -> Promises:
    """Parse ``ttft:500 tpot:50``, in milliseconds. Raises ``ConfigError``."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        try:
            value = float(text) / 1e3
        except ValueError:
            value = -1.0
        if not colon or name not in METRICS or not 0.0 <= value < inf:
            raise ConfigError(
                f"--goodput has {pair!r}, must be NAME:MILLISECONDS with one of: "
                f"{', '.join(METRICS)}, as in {GOODPUT_EXAMPLE}"
            )
        if name in limits:
            raise ConfigError(f"--goodput has {name!r} twice, give it once")
        limits[name] = value
    return Promises(limits)


def own_promises(job: Job) -> Promises:
    """The promises that a workload makes to a request."""
    own = {"ttft": job.ttft, "itl": job.tbt, "e2el": job.deadline}
    return Promises({name: value for name, value in own.items() if value is not None})


def latencies(row: Row, start: float) -> dict[str, float]:
    """Seconds of each metric of a request with tokens; its ``itl`` is that of 99 % of its gaps."""
    first, last = row.times[0], row.times[-1]
    gaps = row.gaps
    return {
        "ttft": first - start,
        "tpot": (last - first) / (row.num_tokens - 1) if row.num_tokens > 1 else 0.0,
        "itl": float(np.quantile(gaps, ITL_SHARE)) if gaps else 0.0,
        "e2el": last - start,
    }


def values_of(rows: Sequence[Row], starts: Sequence[float]) -> dict[str, Values]:
    """All values of each metric. rows: requests with tokens; starts: when each began."""
    found: dict[str, Values] = {}
    each = [latencies(row, start) for row, start in zip(rows, starts, strict=True)]
    everyone = np.arange(len(rows))
    for name in ("ttft", "e2el", "tpot"):
        has = np.array([name != "tpot" or row.num_tokens > 1 for row in rows], dtype=np.bool_)
        values = np.array([times[name] for times in each], dtype=np.float64)
        found[name] = Values(values[has], everyone[has])
    gaps = [row.gaps for row in rows]
    flat = np.array([gap for some in gaps for gap in some], dtype=np.float64)
    found["itl"] = Values(flat, np.repeat(everyone, [len(some) for some in gaps]))
    return {name: found[name] for name in METRICS}


def summary(
    of: Values, num_rows: int, percentiles: Sequence[float], seed: int = 0
) -> dict[str, tuple[float, float, float]]:
    """Mean, median and percentiles of a metric, each with the ends of its 95 % interval."""
    if not len(of.values):
        return {}
    order = np.argsort(of.values, kind="stable")
    values, owners = of.values[order], of.owners[order]
    shares = [0.5, *(each / 100 for each in percentiles)]
    names = ["median", *(f"p{each:g}" for each in percentiles)]
    drawn = []
    for weights in _resampled(num_rows, len(values), seed):
        weight = weights[owners]
        upto = np.cumsum(weight)
        if upto[-1]:
            places = np.searchsorted(upto, np.array(shares) * upto[-1])
            at = values[np.minimum(places, len(values) - 1)]
            drawn.append([float(weight @ values) / upto[-1], *at])
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.array(drawn), [tail, 1 - tail], axis=0)
    points = [float(values.mean()), *np.quantile(values, shares)]
    return {
        name: (float(point), float(least), float(most))
        for name, point, least, most in zip(["mean", *names], points, low, high, strict=True)
    }


def share_interval(kept: Sequence[bool], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the share of requests that are kept."""
    if not kept:
        return 0.0, 0.0
    values = Values(np.array(kept, dtype=np.float64), np.arange(len(kept)))
    _, low, high = summary(values, len(kept), (), seed)["mean"]
    return low, high


def _resampled(num_rows: int, num_values: int, seed: int) -> Any:
    """Yields how often each request is in a resample [requests]."""
    rng = np.random.default_rng(seed)
    length = max(1, round(num_rows ** (1 / 3)))
    number = min(RESAMPLES, max(50, MOST_DRAWN // max(1, num_values)))
    for _ in range(number):
        begins = rng.integers(num_rows, size=ceil(num_rows / length))
        places = (begins[:, None] + np.arange(length)) % num_rows
        yield np.bincount(places.ravel()[:num_rows], minlength=num_rows)


def errors_by_kind(rows: Sequence[Row]) -> dict[str, int]:
    """How many requests failed, by what went wrong; the most frequent first."""
    kinds = Counter(row.error for row in rows if row.error)
    return dict(kinds.most_common())


def figures(
    played: Played,
    *,
    percentiles: Sequence[float] = (90, 99),
    promises: Promises | None = None,
    is_closed: bool = False,
) -> dict[str, Any]:
    """All figures of a run, with vLLM's names where they mean the same. Times are in milliseconds.

    is_closed: latencies count from when a request was sent, since this side held it back; else
    from when it was due.
    """
    rows, seconds = played.rows, max(1e-9, played.end - played.start)
    whole = [row for row in rows if row.is_whole]
    starts = [row.sent if is_closed else row.due for row in whole]
    num_input = sum(row.num_input or row.about.num_prompt for row in whole)
    num_output = sum(row.num_tokens for row in whole)
    num_left = sum(row.how == LEFT or not row.how for row in rows)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(whole),
        "failed": len(rows) - len(whole) - num_left,
        "unfinished": num_left,
        "unsent": played.num_unsent,
        "errors_by_kind": errors_by_kind(rows),
        "interrupted": played.is_interrupted,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(row.num_cached for row in whole),
        "request_throughput": len(whole) / seconds,
        "request_goodput": None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        **_peaks(rows),
    }
    intervals: dict[str, list[float]] = {}
    for name, values in values_of(whole, starts).items():
        for figure, (point, low, high) in summary(values, len(whole), percentiles).items():
            found[f"{figure}_{name}_ms"] = 1e3 * point
            intervals[f"{figure}_{name}_ms"] = [1e3 * low, 1e3 * high]
        found[f"std_{name}_ms"] = 1e3 * float(values.values.std()) if len(values.values) else 0.0
    kept = _kept(rows, promises, is_closed)
    if kept:
        rate = len(kept) / seconds
        found["request_goodput"] = sum(kept) / seconds
        found["promised"], found["promises_kept"] = len(kept), sum(kept)
        intervals["request_goodput"] = [rate * end for end in share_interval(kept)]
    lags = [row.sent - row.due for row in rows]
    found |= {
        "intervals": intervals,
        "longest_silence_ms": 1e3 * longest_silence(rows),
        "client_cpu_share": played.cpu_seconds / seconds,
        "client_cpu_us_per_token": 1e6 * played.cpu_seconds / max(1, num_output),
        "client_lag_p99_ms": 1e3 * float(np.quantile(lags, 0.99))
        if lags and not is_closed
        else 0.0,
    }
    return found


def by_user(
    rows: Sequence[Row], percentiles: Sequence[float] = (90, 99), *, is_closed: bool = False
) -> dict[str, dict[str, float]]:
    """Requests and times to the first token in milliseconds of each user, if there are several.
    is_closed: as in ``figures``."""
    users = sorted({row.about.user for row in rows})
    if len(users) < 2:
        return {}
    found: dict[str, dict[str, float]] = {}
    for user in users:
        own = [row for row in rows if row.about.user == user]
        whole = [row for row in own if row.is_whole]
        found[user] = {"completed": len(whole), "failed": sum(bool(row.error) for row in own)}
        if whole:
            ttfts = [row.ttft + (row.due - row.sent) * is_closed for row in whole]
            for name, share in (("median", 50.0), *((f"p{each:g}", each) for each in percentiles)):
                found[user][f"{name}_ttft_ms"] = 1e3 * float(np.percentile(ttfts, share))
    return found


def _kept(rows: Sequence[Row], promises: Promises | None, is_closed: bool) -> list[bool]:
    """For each request with promises whether they were kept; a failed request keeps none, and one
    that this side has left does not count."""
    found = []
    for row in rows:
        own = promises or own_promises(row.about)
        if own.limits and row.how and row.how != LEFT:
            found.append(own.are_kept(row, row.sent if is_closed else row.due))
    return found


def _peaks(rows: Sequence[Row]) -> dict[str, float]:
    """The most output tokens in a second, and the most requests at a time."""
    times = [moment for row in rows for moment in row.times]
    start = min(times, default=0.0)
    counts = Counter(int(moment - start) for moment in times)
    changes = sorted([(row.sent, 1) for row in rows] + [(row.ended, -1) for row in rows])
    running = np.cumsum([change for _, change in changes]) if changes else np.zeros(1)
    return {
        "max_output_tokens_per_s": float(max(counts.values(), default=0)),
        "max_concurrent_requests": int(running.max()),
    }


def longest_silence(rows: Sequence[Row]) -> float:
    """The longest time in which requests ran and none of them got a token, in seconds."""
    events = sorted(
        [(row.sent, 1, 0) for row in rows]
        + [(moment, 0, 1) for row in rows for moment in row.times]
        + [(row.ended, -1, 0) for row in rows if row.ended]
    )
    longest, running, since = 0.0, 0, 0.0
    for moment, change, is_token in events:
        if running:
            longest = max(longest, moment - since)
        if is_token or not running or running + change == 0:
            since = moment
        running += change
    return longest
