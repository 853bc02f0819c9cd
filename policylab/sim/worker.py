"""A worker that computes nothing and takes the time that a cost model predicts."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.messages.kv_orders import KVOrders
from engine.messages.step import Column, StepPlan, StepResult
from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import Profile
from policylab.sim.job import END, FILLER
from policylab.sim.jumps.stretch import Stretch, Times
from policylab.sim.pooled import PooledSlots
from policylab.sim.tiers import SimulatedTiers
from policylab.verify.fake import FakeExecutor


class VirtualClock:
    """A clock that moves only when ``now`` is set; in seconds since the start of the run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A cost model in which a step's seconds grow linearly with its sizes. The defaults roughly
    match a small GPU."""

    fixed: float = 5e-3
    per_seq: float = 4e-6
    per_token: float = 2e-5
    per_context: float = 1e-8
    """Seconds per token in the KV caches of the step's sequences."""
    per_attention: float = 1e-9
    """Seconds per pair of a new token and a token that it attends to."""

    def seconds(self, shape: StepShape) -> float:
        """The predicted duration of a step of this shape, in seconds."""
        return (
            self.fixed
            + self.per_seq * shape.num_seqs
            + self.per_token * shape.num_tokens
            + self.per_context * shape.context
            + self.per_attention * shape.attention
        )

    def seconds_each(self, shape: StepShape, num_steps: int) -> Times:
        """The durations in seconds of ``num_steps`` successive decode steps; ``shape`` is that of
        the first. The context of each request grows by one token per step. Results are
        bit-identical to those of ``seconds``."""
        more = np.arange(num_steps) * shape.num_seqs
        context, attention = shape.context + more, shape.attention + more
        seconds: Times = (
            self.fixed
            + self.per_seq * shape.num_seqs
            + self.per_token * shape.num_tokens
            + self.per_context * context
            + self.per_attention * attention
        )
        return seconds

    def host_seconds(self, num_seqs: int) -> float:
        """Always 0: the duration of a step includes the host's work."""
        return 0.0

    def __str__(self) -> str:
        return (
            f"{self.fixed * 1e3:g} ms + {self.per_seq * 1e6:g} us a request + "
            f"{self.per_token * 1e6:g} us a token + {self.per_context * 1e9:g} ns a token in the "
            f"cache + {self.per_attention * 1e9:g} ns a pair of attention"
        )


def parameters_of(cost: StepCost | Profile) -> dict[str, Any]:
    """The parameters of a model of step times, as plain data."""
    if isinstance(cost, StepCost):
        return asdict(cost)
    found = {name: getattr(cost, name) for name in ("knots", "coefficients", "factors")}
    return found | ({"windows": cost.windows} if cost.windows else {})


TOKENS: Column = np.array([FILLER, END], dtype=np.int32)  # a token within a text, and the last one
CostEach = Callable[[StepShape, int], Times]


class Cost(Protocol):
    """A model of how long steps take, called once per step, in order. If its ``host_seconds`` are
    always 0, it may also have ``seconds_each``, see ``StepCost``."""

    def seconds(self, shape: StepShape) -> float:
        """Seconds from planning a step of this shape to having its result."""
        ...

    def host_seconds(self, num_seqs: int) -> float:
        """Seconds of host work between a step of ``num_seqs`` requests and the next plan."""
        ...


class Launched(NamedTuple):
    """A step in flight: its result, and its end time in seconds on the clock."""

    result: StepResult
    ends_at: float


class TimedWorker(FakeExecutor):
    """A worker that computes nothing: steps take predicted time, requests end at given lengths."""

    def __init__(
        self, clock: VirtualClock, cost: Cost, num_slots: int, lengths: Mapping[str, int]
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._cost_each: CostEach | None = getattr(cost, "seconds_each", None)
        self._lengths = lengths  # output tokens by request id
        self._ends = np.zeros(num_slots, dtype=np.int32)  # by slot: known tokens at the end
        self._pooled = PooledSlots()
        self._free_at = 0.0
        self.copy_seconds = 0.0
        """Seconds to copy a LoRA adapter into a slot, in the step that first uses it."""
        self.tiers: SimulatedTiers | None = None
        """Carries out the orders for KV tiers."""
        self._num_rows: int | None = (
            None  # rows of the collected step, until the host's time has passed
        )
        self.busy_seconds = 0.0
        """Total seconds of all steps."""

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step; it begins when all steps launched before it have ended."""
        self._pooled.follow(plan)
        for new in plan.new:
            self._ends[new.slot] = new.num_prompt + self._lengths[new.request_id]
        seconds = self._cost.seconds(StepShape.of(plan, 0.0)) if plan.num_tokens else 0.0
        if plan.adapters is not None:
            seconds += self.copy_seconds * len(plan.adapters.load)
        if self.tiers is not None and isinstance(plan.kv_transfer, KVOrders):
            seconds += self.tiers.carry_out(plan.kv_transfer)
        known = plan.starts + plan.counts + 1  # including the token sampled in this step
        tokens = TOKENS.take(known >= self._ends[plan.slots])
        if not plan.samples.all():
            tokens = tokens[plan.samples == 1]
        result = StepResult(plan.step, tokens, plan.samples, seconds=seconds)
        self._pooled.end(plan, result)
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return Launched(result, self._free_at)

    def repeat(self, stretch: Stretch, tickets: Sequence[Launched]) -> list[Launched]:
        """Execute steps of ``stretch`` until ``stretch.until`` (seconds) or until a request is
        about to end. Returns the tickets of the steps that are then in flight."""
        left = int((self._ends[stretch.slots] - stretch.starts).min()) - 2
        most = min(stretch.max_steps, left)
        if most < 1:
            return list(tickets)
        num_planned = min(stretch.max_planned, most + 1)
        take = self._take_one_by_one if self._cost_each is None else self._take_together
        launched, seconds = take(stretch, most, num_planned, [each.ends_at for each in tickets])
        count = stretch.num_steps
        self.busy_seconds = _sums(self.busy_seconds, seconds)[-1]
        self._free_at, self._clock.now = launched[-1], stretch.next_begin
        stretch.seconds = np.array([*(each.result.seconds for each in tickets), *seconds])[:count]
        stretch.token = FILLER
        self.repeated(stretch, launched, seconds)
        new = range(max(0, count - len(tickets)), stretch.num_planned)
        return [
            *tickets[count:],
            *(Launched(self._result(stretch, at, seconds[at]), launched[at]) for at in new),
        ]

    def repeated(
        self, stretch: Stretch, launched: Sequence[float], seconds: Sequence[float]
    ) -> None:
        """Called after steps of a stretch were launched; subclasses may override it. ``launched``:
        end time of each step; ``seconds``: their durations."""

    def rest(self) -> None:
        """Advance the clock by the host's work between two steps. To be called after each step."""
        if self._num_rows is not None:
            self._clock.now += self._cost.host_seconds(self._num_rows)
        self._num_rows = None

    def _take_one_by_one(
        self, stretch: Stretch, most: int, num_planned: int, in_flight: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Compute the times of a stretch's steps, one call of the cost model per step, and store
        them. Returns the end times and the durations of the launched steps, in seconds."""
        now, free_at, num_rows = self._clock.now, self._free_at, len(stretch.rows)
        coming, launched, all_seconds = deque(in_flight), [], []
        begins: list[float] = []
        ends: list[float] = []
        while len(begins) < num_planned and now < stretch.until:
            seconds = self._cost.seconds(stretch.shape(len(begins)))
            free_at = max(free_at, now) + seconds
            coming.append(free_at)
            launched.append(free_at)
            all_seconds.append(seconds)
            begins.append(now)
            if len(ends) < most:
                ends.append(max(now, coming.popleft()))
                now = ends[-1] + self._cost.host_seconds(num_rows)
        stretch.begins, stretch.ends, stretch.next_begin = np.array(begins), np.array(ends), now
        return launched, all_seconds

    def _take_together(
        self, stretch: Stretch, most: int, num_planned: int, in_flight: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Compute the times of a stretch's steps with one call of ``seconds_each``, for cost models
        without host time. Returns the end times and durations of the launched steps, in seconds."""
        now, begun, shape = self._clock.now, self._free_at, stretch.shape()
        assert self._cost_each is not None
        # Only few may begin before ``until``: compute a guess first, and all only if it is too
        # small.
        first = self._cost.seconds(shape)
        guess = (stretch.until - now) / first if first else inf
        for tried in sorted({min(num_planned, int(min(guess, most)) + 2), num_planned}):
            seconds = self._cost_each(shape, tried).tolist()
            launched = _sums(max(begun, now), seconds)[1:]
            ends = ([max(now, end) for end in in_flight] + launched)[:tried]
            if ends[-1] >= stretch.until:
                break
        count = min(most, tried, 1 + bisect_left(ends, stretch.until))
        begins = [now, *ends[: count - 1]]
        stretch.next_begin = ends[count - 1]
        if count < num_planned and stretch.next_begin < stretch.until:
            begins.append(stretch.next_begin)
        stretch.begins, stretch.ends = np.array(begins), np.array(ends[:count])
        return launched[: len(begins)], seconds[: len(begins)]

    def _result(self, stretch: Stretch, index: int, seconds: float) -> StepResult:
        """The result of the step at this index of the stretch."""
        known = stretch.starts + (index + 2)
        tokens = TOKENS.take(known >= self._ends[stretch.slots])
        return StepResult(stretch.step + index, tokens, np.ones_like(tokens), seconds=seconds)

    def collect(self, ticket: Launched) -> StepResult:
        """Advance the clock to the end of the step and return the step's result."""
        self._clock.now = max(self._clock.now, ticket.ends_at)
        self._num_rows = len(ticket.result.counts)
        return ticket.result


def _sums(first: float, more: Iterable[float]) -> list[float]:
    """Return the running sums of ``first`` followed by the values in ``more``."""
    return list(accumulate(more, initial=first))
