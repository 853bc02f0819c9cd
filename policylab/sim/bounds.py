"""Lower bounds that no scheduler can beat, and how close a run comes to them.

A step takes ``fixed + per_seq * rows + per_token * tokens + per_context * context + per_attention *
pairs``. Given the prefix hits of a run, all terms but ``fixed`` follow from the workload; the
scheduler only decides how many steps there are. A request with ``o`` output tokens has ``o - 1``
decodes.

*Steps*: the largest of four numbers: all new tokens divided by the token budget ("tokens"); all
rows (one per sequence and step) divided by ``max_num_seqs`` ("seats"); the steps of the longest
request ("chain"); the KV held at all decodes, summed and divided by the KV pool ("KV area").

*Makespan*: the largest of: for each arrival, its time plus the cost of this request and all later
ones in that number of steps; for each request, its arrival plus its time alone.

*Mean latency*: the larger of two bounds. One is the mean time of requests that are alone on an idle
engine. The other is the shortest-remaining-time schedule on a machine where a request costs its own
time plus a share of the fixed part of steps. A step holds at most M tokens of context, S rows and B
new tokens, so the share is at least ``fixed / M`` per token of context, ``fixed / S`` per row, or
``fixed / B`` per new token. The second bound is loose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import Profile
from policylab.sim.estimate import Floats
from policylab.sim.records import Requests
from policylab.sim.worker import StepCost

MANY = 10**6
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WorkBound:
    """The sizes of a run's requests (arrays with one entry per request), and the limits and step
    cost of its engine."""

    arrival: Floats
    prompt: Counts
    cached: Counts
    """Prompt tokens that were in the cache."""
    output: Counts
    cost: StepCost
    """The cost of a step; if ``profile`` is given, a lower bound of it."""
    max_tokens: int
    """Token budget of a step."""
    max_seqs: int
    """Maximum number of rows (sequences) per step."""
    pool: int
    """Tokens that fit into the KV pool."""
    profile: Profile | None = None
    """The actual cost of a step, if it is not affine."""

    @property
    def new(self) -> Counts:
        """Number of prompt tokens that each request must compute: not in the cache, at least 1."""
        new: Counts = np.maximum(1, self.prompt - self.cached)
        return new

    @property
    def decodes(self) -> Counts:
        decodes: Counts = np.maximum(0, self.output - 1)
        return decodes

    @property
    def tokens(self) -> Counts:
        return self.new + self.decodes

    @property
    def chain(self) -> Counts:
        """For each request, the smallest number of steps in which it can be computed."""
        return self._chunks + self.decodes

    @property
    def decode_context(self) -> Counts:
        """For each request, the context lengths (tokens in the KV cache) of all its decode steps,
        added up."""
        return self.prompt * self.decodes + self.decodes * (self.decodes - 1) // 2

    @property
    def own_context(self) -> Counts:
        """For each request, the context lengths (tokens in the KV cache) of all its decode steps,
        added up. Tokens of its prefix hit, which requests may share, are not counted."""
        return self.decode_context - (self.prompt - self.new) * self.decodes

    @property
    def pairs(self) -> Counts:
        """For each request, the number of pairs of a computed token and a token that it attends
        to."""
        known, found = self.prompt + self.decodes, self.prompt - self.new
        return (known * (known + 1) - found * (found + 1)) // 2

    def busy(self) -> Floats:
        """For each request, the least seconds that it adds to steps, besides their fixed cost."""
        cost, found = self.cost, self.prompt - self.new
        return (
            cost.per_seq * (1 + self.decodes)
            + cost.per_token * self.tokens
            + cost.per_context * (self.decode_context + found)
            + cost.per_attention * self.pairs
        )

    def alone(self) -> Floats:
        """For each request, the seconds from arrival to last token if it runs alone on an idle
        engine, with only its last prompt chunk incomplete."""
        if self.profile is not None:
            return self._by_profile(self.profile)
        chunks = self._chunks
        filled = self.max_tokens * (chunks * (chunks - 1) // 2)
        return self._alone(filled + (chunks - 1) * (self.prompt - self.new))

    def fastest(self) -> Floats:
        """For each request, the seconds from arrival to last token if it runs alone on an idle
        engine, with the incomplete prompt chunk first, which is fastest."""
        chunks = self._chunks
        rest = self.new - (chunks - 1) * self.max_tokens
        filled = self.max_tokens * ((chunks - 1) * (chunks - 2) // 2)
        return self._alone(filled + (chunks - 1) * (self.prompt - self.new + rest))

    def _by_profile(self, profile: Profile) -> Floats:
        seconds = np.zeros(len(self.prompt))
        sizes = zip(*(each.tolist() for each in (self.prompt, self.new, self.decodes)), strict=True)
        for row, (prompt, new, decodes) in enumerate(sizes):
            for start in range(prompt - new, prompt, self.max_tokens):
                size = min(self.max_tokens, prompt - start)
                pairs = size * start + size * (size + 1) // 2
                shape = StepShape(1, size, int(size == 1), start, pairs, 0.0)
                seconds[row] += profile.seconds(shape)
            if decodes:  # affine in the context: the middle one is their mean
                middle = prompt + (decodes - 1) // 2
                shape = StepShape(1, 1, 1, middle, middle + 1, 0.0)
                seconds[row] += decodes * profile.seconds(shape)
        return seconds

    @property
    def _chunks(self) -> Counts:
        chunks: Counts = -(-self.new // self.max_tokens)
        return chunks

    def _alone(self, context: Counts) -> Floats:
        """Seconds that each request takes alone on an idle engine. ``context``: tokens in its KV
        cache before each prompt chunk but the first, added up."""
        more = self.cost.per_seq * (self._chunks - 1) + self.cost.per_context * context
        return self.cost.fixed * self.chain + self.busy() + more


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The lower bounds of a run's figures for any scheduler."""

    steps: int
    by: str
    """The name of the bound that needs the most steps, such as "tokens"."""
    makespan: float
    """Seconds from the start of the run to the last token."""
    mean_e2e: float
    """Mean seconds from arrival to last token."""


def work_of(requests: Requests, head: dict[str, Any]) -> WorkBound | None:
    """Returns the work of a run's requests that finished normally; ``None`` if there are none or
    the step cost is unknown. ``head``: the head of the run's file."""
    done, engine, charged = requests.done, head.get("engine"), head.get("step_cost")
    if not engine or not charged or not done.any():
        return None
    profile = None
    if "knots" in charged:
        profile = Profile(name="", is_calibrated=True, **charged)
    counts = {name: requests.counts(f"num_{name}")[done] for name in ("prompt", "cached", "output")}
    return WorkBound(
        arrival=requests.times("arrival")[done],
        **counts,
        cost=StepCost(**charged) if profile is None else least_cost(profile),
        max_tokens=engine["max_num_batched_tokens"],
        max_seqs=engine["max_num_seqs"],
        pool=pool_of(engine),
        profile=profile,
    )


def pool_of(engine: Mapping[str, Any]) -> int:
    """Tokens whose keys and values in all groups of full attention fill the KV pool. With windows
    in all groups the pool bounds no number of tokens, so the result is very large."""
    num_full = list(engine.get("kv_groups") or [0]).count(0)
    size: int = engine["num_blocks"] * engine["block_size"]
    return size // num_full if num_full else size * MANY


def least_cost(profile: Profile) -> StepCost:
    """Returns an affine step cost that is never above the profile's mean cost."""
    least = min([1.0, *profile.factors.values()])
    step, _, sequence, _, context, attention, *tokens = (least * c for c in profile.coefficients)
    return StepCost(
        fixed=step,
        per_seq=sequence,
        per_token=min(tokens),
        per_context=context,
        per_attention=attention,
    )


def bounds(work: WorkBound) -> Bounds:
    """Returns the lower bounds for this work on any scheduler."""
    needed = {
        "tokens": -(-int(work.tokens.sum()) // work.max_tokens),
        "seats": -(-int((1 + work.decodes).sum()) // work.max_seqs),
        "chain": int(work.chain.max()),
        "KV area": -(-int(work.own_context.sum()) // work.pool),
    }
    by = max(needed, key=lambda name: needed[name])
    return Bounds(steps=needed[by], by=by, makespan=makespan(work), mean_e2e=mean_e2e(work))


def makespan(work: WorkBound) -> float:
    """Returns a lower bound of the seconds from the start of the run to the last token."""
    order = np.argsort(work.arrival, kind="stable")

    def coming(amounts: Any) -> Any:
        """Returns suffix sums in order of arrival: each request's amount plus all later amounts."""
        return amounts[order][::-1].cumsum()[::-1]

    steps = np.maximum.reduce(
        [
            np.ceil(coming(work.tokens) / work.max_tokens),
            np.ceil(coming(1 + work.decodes) / work.max_seqs),
            np.ceil(coming(work.own_context) / work.pool),
        ]
    )
    together = work.arrival[order] + work.cost.fixed * steps + coming(work.busy())
    return float(max(together.max(), (work.arrival + work.fastest()).max()))


def mean_e2e(work: WorkBound) -> float:
    """Returns a lower bound of the mean seconds from arrival to last token."""
    fixed = work.cost.fixed
    shares = (
        work.own_context / work.pool,
        (1 + work.decodes) / work.max_seqs,
        work.tokens / work.max_tokens,
    )
    ends = [srpt(work.arrival, work.busy() + fixed * share) for share in shares]
    return max(
        float(work.fastest().mean()), *(float((each - work.arrival).mean()) for each in ends)
    )


def srpt(arrival: Floats, size: Floats) -> Floats:
    """Returns the end time of each job on one machine that always runs the job with the shortest
    remaining time; no order has a smaller sum of end times. ``arrival``, ``size``: seconds of each
    job."""
    ends = np.zeros(len(arrival))
    waiting: list[tuple[float, int]] = []
    now = 0.0
    for row in [*np.argsort(arrival, kind="stable").tolist(), -1]:
        until = float(arrival[row]) if row >= 0 else np.inf
        while waiting and now < until:
            left, job = heappop(waiting)
            if now + left <= until:
                now += left
                ends[job] = now
            else:
                heappush(waiting, (left - (until - now), job))
                now = until
        if row >= 0:
            now = max(now, until)
            heappush(waiting, (float(size[row]), row))
    return ends
