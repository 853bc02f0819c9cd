"""How much service each user got, and how even it was while several users waited.

Service is counted as in VTC: 1 per prompt token and 2 per generated token, divided by the user's
weight. Within a request, prompt tokens are spread evenly from its first step to its first token,
and generated tokens from the first to the last token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policylab.sim.estimate import Floats
from policylab.sim.promises import e2e, ttft
from policylab.sim.records import Requests
from policylab.sim.steady import Window

PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0
MAX_USERS = 8  # users with the most requests: the cost grows with their number
NUM_WINDOWS = 50
MAX_POINTS = 20_000


@dataclass(frozen=True, kw_only=True)
class ServedUser:
    """The requests, tokens and mean latencies of one user."""

    name: str
    num_requests: int
    num_done: int
    prompt_tokens: int
    output_tokens: int
    ttft: float
    """Mean time to the first token, in seconds."""
    e2e: float
    """Mean time from arrival to the last token, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """The service of all users."""

    users: list[ServedUser]
    jain: float
    """Jain's index of how even the service was; 1 is even. The period is divided into fifty parts.
    Each part in which two or more users waited throughout has an index; this is their mean,
    weighted by the number of these users. NaN if there is no such part."""
    gap: float
    """VTC's gap: the largest difference between the service of two users over any time in which
    both waited throughout. NaN if two users never waited at the same time."""
    bound: float
    """VTC's bound for the gap: twice the larger of two services, that of the longest prompt and
    that of all tokens that fit into the engine."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The cumulative service of each of the users with the most requests, over time."""

    users: list[str]
    weights: Floats
    times: Floats
    """The points in time [points], in seconds."""
    waits: NDArray[np.bool_]
    """[users, points]: True if the user has a request in the queue from this point to the next."""
    served: Floats
    """[users, points]: the user's service from the start up to each point. It is the number of
    tokens, each counted at its price, divided by the user's weight."""


def curves(
    requests: Requests, counted: NDArray[np.bool_], window: Window, engine: dict[str, Any]
) -> Curves | None:
    """The cumulative service of the users in the measured period; ``None`` for a single user.
    ``counted``: mask of the requests that count. ``engine``: options of the engine."""
    names = requests.text("user")
    found, sizes = np.unique(names[counted].astype(str), return_counts=True)
    if len(found) < 2:
        return None
    most = sorted(found[np.argsort(-sizes, kind="stable")][:MAX_USERS].tolist())
    weights = (engine.get("scheduler") or {}).get("user_weights") or {}
    prices = np.array([float(weights.get(name, 1.0)) for name in most])
    points = _points(requests, window)
    served = np.array([_served(requests, names == name, points) for name in most])
    return Curves(
        users=most,
        weights=prices,
        times=points,
        waits=np.array([_waiting(requests, names == name, points) for name in most]),
        served=served / prices[:, None],
    )


def service(
    requests: Requests, counted: NDArray[np.bool_], window: Window, engine: dict[str, Any]
) -> Service | None:
    """Compute the service of each user in the measured period; ``None`` for a single user.
    ``counted``: mask of the requests that count. ``engine``: options of the engine."""
    curve = curves(requests, counted, window, engine)
    if curve is None:
        return None
    names = requests.text("user")
    found = np.unique(names[counted].astype(str))
    users = [_user(requests, counted & (names == name), name) for name in found.tolist()]
    seats = engine.get("max_num_batched_tokens", 0)
    if "num_blocks" in engine:
        seats = engine["num_blocks"] * engine["block_size"]
    longest = int(requests.counts("num_prompt").max(initial=0))
    return Service(
        users=users,
        jain=_jain(curve, window),
        gap=widest_gap(curve).value,
        bound=2.0 * max(PROMPT_PRICE * longest, OUTPUT_PRICE * seats) / float(curve.weights.min()),
    )


def _user(requests: Requests, mine: NDArray[np.bool_], name: str) -> ServedUser:
    done = mine & requests.done
    return ServedUser(
        name=name,
        num_requests=int(mine.sum()),
        num_done=int(done.sum()),
        prompt_tokens=int(requests.counts("num_prompt")[done].sum()),
        output_tokens=int(requests.counts("num_output")[done].sum()),
        ttft=float(ttft(requests)[done].mean()) if done.any() else nan,
        e2e=float(e2e(requests)[done].mean()) if done.any() else nan,
    )


def _points(requests: Requests, window: Window) -> Floats:
    """The times, in seconds, at which cumulative service is computed: all arrivals, first steps,
    first and last tokens in the period, and the edges of its fifty parts."""
    columns = [requests.times(name) for name in ("arrival", "scheduled", "first", "last")]
    edges = np.linspace(window.start, window.end, NUM_WINDOWS + 1)
    points = np.unique(np.concatenate([*columns, edges]))
    points = points[(points >= window.start) & (points <= window.end)]
    if len(points) > MAX_POINTS:
        thinned = points[:: -(-len(points) // MAX_POINTS)]
        points = np.unique(np.concatenate([thinned, edges]))
    return points


def _waiting(requests: Requests, mine: NDArray[np.bool_], points: Floats) -> NDArray[np.bool_]:
    """For each point in time [points], return True if the user has a waiting request from then
    until the next point. ``mine``: mask of the user's requests."""
    mine = mine & ~np.isnan(requests.times("scheduled"))
    begun = np.sort(requests.times("arrival")[mine])
    ended = np.sort(requests.times("scheduled")[mine])
    after = [np.searchsorted(times, points, side="right") for times in (begun, ended)]
    return np.asarray(after[0] > after[1], dtype=np.bool_)


def _served(requests: Requests, mine: NDArray[np.bool_], points: Floats) -> Floats:
    """Return the cumulative service of one user at each point in time [points], not divided by the
    user's weight. ``mine``: mask of the user's requests."""
    mine = mine & requests.done
    scheduled, first, last = (requests.times(n)[mine] for n in ("scheduled", "first", "last"))
    prompts = PROMPT_PRICE * requests.counts("num_prompt")[mine].astype(np.float64)
    outputs = OUTPUT_PRICE * requests.counts("num_output")[mine].astype(np.float64)
    of_prompts = _spread(scheduled, first, prompts, points)
    of_prompts += _spread(first, last, outputs, points)
    return of_prompts


def _spread(begins: Floats, ends: Floats, amounts: Floats, points: Floats) -> Floats:
    """Return the total amount received until each point in time [points], if each of ``amounts`` is
    received at a constant rate from its begin to its end."""
    ends = np.maximum(ends, begins + 1e-9)
    rates = amounts / (ends - begins)
    total = np.zeros(len(points))
    for times, sign in ((begins, 1.0), (ends, -1.0)):
        order = np.argsort(times, kind="stable")
        times, slopes = times[order], sign * rates[order]
        slope = np.concatenate([[0.0], slopes.cumsum()])
        offset = np.concatenate([[0.0], (slopes * times).cumsum()])
        place = np.searchsorted(times, points, side="right")
        total += slope[place] * points - offset[place]
    return total


def jain_by_window(curve: Curves, window: Window) -> list[tuple[float, float, int]]:
    """For each fiftieth of the period: middle (seconds), Jain's fairness index of the service of
    users who waited throughout, and their number. Fiftieths with fewer than two are left out."""
    edges = np.linspace(window.start, window.end, NUM_WINDOWS + 1)
    places = np.searchsorted(curve.times, edges)
    found: list[tuple[float, float, int]] = []
    for part, (first, last) in enumerate(pairwise(places.tolist())):
        if last <= first or last >= len(curve.times):
            continue
        through = curve.waits[:, first:last].all(axis=1)
        got = (curve.served[:, last] - curve.served[:, first])[through]
        squares = float((got * got).sum())
        if len(got) >= 2 and squares > 0.0:
            middle = float(edges[part] + edges[part + 1]) / 2
            found.append((middle, float(got.sum()) ** 2 / (len(got) * squares), len(got)))
    return found


def _jain(curve: Curves, window: Window) -> float:
    shares = jain_by_window(curve, window)
    total = sum(count for _, _, count in shares)
    return sum(index * count for _, index, count in shares) / total if total else nan


class ServiceGap(NamedTuple):
    """The largest growth of the difference in service between two users while both waited."""

    value: float
    """The difference in service: tokens, each counted at its price, divided by the user's weight.
    NaN if no two users waited at the same time."""
    begin: float
    end: float
    """``begin`` and ``end``: the times in seconds between which the gap arose."""
    ahead: str
    later: str


def widest_gap(curve: Curves) -> ServiceGap:
    """Find the two users whose difference in service grew most over a time in which both waited."""
    worst = ServiceGap(nan, nan, nan, "", "")
    for one, other in combinations(range(len(curve.waits)), 2):
        both = curve.waits[one] & curve.waits[other]
        ahead = curve.served[one] - curve.served[other]
        changes = np.flatnonzero(np.diff(np.concatenate([[0], both.astype(np.int8), [0]])))
        for first, last in zip(changes[::2], changes[1::2], strict=True):
            part = ahead[first : last + 1]  # includes the point at which one stops waiting
            gap = float(part.max() - part.min())
            if not gap <= worst.value:
                low, high = int(part.argmin()), int(part.argmax())
                begin, end = (float(curve.times[first + place]) for place in sorted((low, high)))
                names = (curve.users[one], curve.users[other])
                worst = ServiceGap(gap, begin, end, *(names if low < high else names[::-1]))
    return worst
