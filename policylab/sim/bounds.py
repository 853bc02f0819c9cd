"""What no scheduler can beat on a workload, and how far from it a run was.

With a step that takes ``fixed + per_seq * rows + per_token * tokens + per_context * context +
per_attention * pairs``, and with the prefix hits that the run had, all terms but the first are the
workload's own: a scheduler decides how many steps there are, and what is computed twice. A request
of ``p`` prompt tokens, of which ``h`` were in the cache, and ``o`` output tokens has
``d = o - 1`` decodes.

*Steps* are at least as many as each of these asks for: all tokens through the budget of a step
("tokens"); all rows through the seats ("seats"); the longest request, one step after the other
("chain"); the KV that requests hold while they decode, summed over their steps, through the pool
("KV area").

*Makespan*: for each arrival, that time and what the requests that came then or later cost in so
many steps; and each request's arrival and what it takes alone.

*Mean latency*: what the requests take alone on an idle engine; and the shortest remaining
processing time first on one machine that serves nothing but its share of a step's fixed part: as a
step holds at most M tokens of context, S rows and B new tokens, that share is at least
``fixed / M`` a token of context, or ``fixed / S`` a row, or ``fixed / B`` a token. The larger one
counts. It is valid, and loose.
"""

from __future__ import annotations

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

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WorkBound:
    """What requests ask of an engine, and what the engine has. Arrays have an entry a request."""

    arrival: Floats
    prompt: Counts
    cached: Counts
    """Prompt tokens that were in the cache."""
    output: Counts
    cost: StepCost
    """At least this much is charged for a step."""
    max_tokens: int
    """New tokens in a step."""
    max_seqs: int
    """Rows in a step."""
    pool: int
    """Tokens that fit into the KV cache."""
    profile: Profile | None = None
    """What is charged, where that is not affine."""

    @property
    def new(self) -> Counts:
        """Prompt tokens to compute."""
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
        """Steps that each request takes by itself."""
        return self._chunks + self.decodes

    @property
    def decode_context(self) -> Counts:
        """Tokens in the cache, summed over a request's decodes."""
        return self.prompt * self.decodes + self.decodes * (self.decodes - 1) // 2

    @property
    def own_context(self) -> Counts:
        """Likewise, without those that the request found in the cache: others may hold them."""
        return self.decode_context - (self.prompt - self.new) * self.decodes

    @property
    def pairs(self) -> Counts:
        """New tokens and those they attend to."""
        known, found = self.prompt + self.decodes, self.prompt - self.new
        return (known * (known + 1) - found * (found + 1)) // 2

    def busy(self) -> Floats:
        """Seconds of steps that a request causes at least, their fixed part aside."""
        cost, found = self.cost, self.prompt - self.new
        return (
            cost.per_seq * (1 + self.decodes)
            + cost.per_token * self.tokens
            + cost.per_context * (self.decode_context + found)
            + cost.per_attention * self.pairs
        )

    def alone(self) -> Floats:
        """Seconds from arrival to last token on an idle engine, which fills its steps."""
        if self.profile is not None:
            return self._by_profile(self.profile)
        chunks = self._chunks
        filled = self.max_tokens * (chunks * (chunks - 1) // 2)
        return self._alone(filled + (chunks - 1) * (self.prompt - self.new))

    def fastest(self) -> Floats:
        """Likewise, at best: what is left over of a prompt goes first, before there is context."""
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
        """``context``: tokens in the cache, summed over all chunks of the prompt but the first."""
        more = self.cost.per_seq * (self._chunks - 1) + self.cost.per_context * context
        return self.cost.fixed * self.chain + self.busy() + more


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What no scheduler can beat."""

    steps: int
    by: str
    """Which bound asks for most steps."""
    makespan: float
    """Seconds from the start of the run to the last token."""
    mean_e2e: float
    """Mean seconds from arrival to last token."""


def work_of(requests: Requests, head: dict[str, Any]) -> WorkBound | None:
    """What the requests that ended well requested; ``None`` where the cost of a step is not known.
    ``head``: that of the run."""
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
        pool=engine["num_blocks"] * engine["block_size"],
        profile=profile,
    )


def least_cost(profile: Profile) -> StepCost:
    """An affine cost that is nowhere above the profile's mean."""
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
    """The bounds of this work."""
    needed = {
        "tokens": -(-int(work.tokens.sum()) // work.max_tokens),
        "seats": -(-int((1 + work.decodes).sum()) // work.max_seqs),
        "chain": int(work.chain.max()),
        "KV area": -(-int(work.own_context.sum()) // work.pool),
    }
    by = max(needed, key=lambda name: needed[name])
    return Bounds(steps=needed[by], by=by, makespan=makespan(work), mean_e2e=mean_e2e(work))


def makespan(work: WorkBound) -> float:
    """Seconds from the start of the run to the last token, at least."""
    order = np.argsort(work.arrival, kind="stable")

    def coming(amounts: Any) -> Any:
        """Summed over each request and all that come later."""
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
    """Mean seconds from arrival to last token, at least."""
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
    """When jobs of these sizes (seconds) end on one machine, the shortest remaining first
    [requests]: no order has a smaller sum."""
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
