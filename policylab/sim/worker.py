"""A worker that computes nothing and takes the time that a linear model predicts."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from engine.messages.step import Column, StepPlan, StepResult
from engine.sched.predict.cost import StepShape
from policylab.sim.job import END, FILLER
from policylab.sim.jumps.stretch import Stretch, Times
from policylab.verify.fake import FakeExecutor


class VirtualClock:
    """Seconds since the start of the run; moves only when it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a step, affine in its sizes. The defaults are roughly
    those of a small GPU, not of a particular machine."""

    fixed: float = 5e-3
    per_seq: float = 4e-6
    per_token: float = 2e-5
    per_context: float = 1e-8
    """For each token in the cache of a sequence in the step."""
    per_attention: float = 1e-9
    """For each pair of a new token and one that it attends to."""

    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes."""
        return (
            self.fixed
            + self.per_seq * shape.num_seqs
            + self.per_token * shape.num_tokens
            + self.per_context * shape.context
            + self.per_attention * shape.attention
        )

    def seconds_each(self, shape: StepShape, num_steps: int) -> Times:
        """How long each of this many steps takes of which this is the first; every row of a later
        one has a token more in the cache. Equal to ``seconds`` of each to the last bit."""
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
        """None of its own, as steps are counted from plan to plan."""
        return 0.0

    def __str__(self) -> str:
        return (
            f"{self.fixed * 1e3:g} ms + {self.per_seq * 1e6:g} us a request + "
            f"{self.per_token * 1e6:g} us a token + {self.per_context * 1e9:g} ns a token in the "
            f"cache + {self.per_attention * 1e9:g} ns a pair of attention"
        )


TOKENS: Column = np.array([FILLER, END], dtype=np.int32)  # one that others follow, and the last
CostEach = Callable[[StepShape, int], Times]


class Cost(Protocol):
    """How long steps take, called once for each in their order. One that can be called for several
    at once has ``seconds_each`` as ``StepCost`` has it; its ``host_seconds`` are 0."""

    def seconds(self, shape: StepShape) -> float:
        """Seconds of the next step, from its plan to its result."""
        ...

    def host_seconds(self, num_seqs: int) -> float:
        """From the result of a step of this many rows to the next plan."""
        ...


class Launched(NamedTuple):
    """A step under way."""

    result: StepResult
    ends_at: float


class TimedWorker(FakeExecutor):
    """Runs steps one after the other on a virtual clock; each request ends at its own length."""

    def __init__(
        self, clock: VirtualClock, cost: Cost, num_slots: int, lengths: Mapping[str, int]
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._cost_each: CostEach | None = getattr(cost, "seconds_each", None)
        self._lengths = lengths  # output tokens by request id
        self._ends = np.zeros(num_slots, dtype=np.int32)  # by slot: known tokens at its end
        self._free_at = 0.0
        self._num_rows: int | None = None  # of the step collected, until the host has had its share
        self.busy_seconds = 0.0
        """Seconds that its steps have taken in all."""

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step, after those begun before."""
        for new in plan.new:
            self._ends[new.slot] = new.num_prompt + self._lengths[new.request_id]
        seconds = self._cost.seconds(StepShape.of(plan, 0.0)) if plan.num_tokens else 0.0
        known = plan.starts + plan.counts + 1  # once the token sampled in this step is
        tokens = TOKENS.take(known >= self._ends[plan.slots])
        if not plan.samples.all():
            tokens = tokens[plan.samples == 1]
        result = StepResult(plan.step, tokens, plan.samples, seconds=seconds)
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return Launched(result, self._free_at)

    def repeat(self, stretch: Stretch, tickets: Sequence[Launched]) -> list[Launched]:
        """Repeat the steps of a stretch that come before ``until`` and before any row ends, and
        launch the one in which a row does."""
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
        """Steps of a stretch were launched: when each of them ends, and how long it takes. For
        those who keep account."""

    def rest(self) -> None:
        """To be called after each step of the core: the host's share of it passes."""
        if self._num_rows is not None:
            self._clock.now += self._cost.host_seconds(self._num_rows)
        self._num_rows = None

    def _take_one_by_one(
        self, stretch: Stretch, most: int, num_planned: int, in_flight: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Fill in the times of a stretch; ends and seconds of the steps launched in it."""
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
        """Take durations that can be had at once, where the host takes no time."""
        now, begun, shape = self._clock.now, self._free_at, stretch.shape()
        assert self._cost_each is not None
        # Few of them may come in time: more are computed only where these are too few.
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
        """What one of its steps brings."""
        known = stretch.starts + (index + 2)
        tokens = TOKENS.take(known >= self._ends[stretch.slots])
        return StepResult(stretch.step + index, tokens, np.ones_like(tokens), seconds=seconds)

    def collect(self, ticket: Launched) -> StepResult:
        """Wait until a step has ended."""
        self._clock.now = max(self._clock.now, ticket.ends_at)
        self._num_rows = len(ticket.result.counts)
        return ticket.result


def _sums(first: float, more: Iterable[float]) -> list[float]:
    """The first, and the sum after each of the others, added one by one."""
    return list(accumulate(more, initial=first))
