"""A worker that computes nothing and takes the time a linear model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.messages.step import StepPlan, StepResult
from engine.sched.predict.cost import StepShape
from engine.sim.job import END, FILLER
from engine.verify.fake import FakeExecutor


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

    def __str__(self) -> str:
        return (
            f"{self.fixed * 1e3:g} ms + {self.per_seq * 1e6:g} us a request + "
            f"{self.per_token * 1e6:g} us a token + {self.per_context * 1e9:g} ns a token in the "
            f"cache + {self.per_attention * 1e9:g} ns a pair of attention"
        )


class Launched(NamedTuple):
    """A step under way."""

    result: StepResult
    ends_at: float


class TimedWorker(FakeExecutor):
    """Runs steps one after the other on a virtual clock; each request ends at its own length."""

    def __init__(
        self, clock: VirtualClock, cost: StepCost, num_slots: int, lengths: Mapping[str, int]
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._lengths = lengths  # output tokens by request id
        self._ends = np.zeros(num_slots, dtype=np.int32)  # by slot: known tokens at its end
        self._free_at = 0.0
        self.busy_seconds = 0.0
        """Seconds that its steps have taken in all."""

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step, behind those begun before."""
        for new in plan.new:
            self._ends[new.slot] = new.num_prompt + self._lengths[new.request_id]
        seconds = self._cost.seconds(StepShape.of(plan, 0.0)) if plan.num_tokens else 0.0
        known = plan.starts + plan.counts + 1  # once the token sampled in this step is
        tokens = np.where(known >= self._ends[plan.slots], END, FILLER).astype(np.int32)
        result = StepResult(
            plan.step, tokens[plan.samples == 1], plan.samples.copy(), seconds=seconds
        )
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, self._clock.now) + seconds
        return Launched(result, self._free_at)

    def collect(self, ticket: Launched) -> StepResult:
        """Wait until a step has ended."""
        self._clock.now = max(self._clock.now, ticket.ends_at)
        return ticket.result
