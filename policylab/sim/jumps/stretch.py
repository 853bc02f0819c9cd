"""Stretch: a run of identical decode steps that is simulated in one call."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import EMPTY, Column, StepPlan
from engine.sched.predict.cost import StepShape
from policylab.sim.kv_groups import KVPeaks

Times = NDArray[np.float64]
NO_TIMES: Times = np.empty(0)


@dataclass(eq=False, slots=True)
class Growth:
    """The KV blocks that requests get during a stretch of decode steps: parallel lists with one
    entry per block."""

    steps: list[int] = field(default_factory=list)  # 0 for the first step of the stretch
    places: list[int] = field(default_factory=list)  # index of the request within the stretch
    indices: list[int] = field(default_factory=list)  # in the request's block table
    blocks: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # of layers; empty if there is only one
    peaks: KVPeaks = field(default_factory=KVPeaks)  # after each step


@dataclass(eq=False, slots=True)
class Stretch:
    """Successive decode steps in which the same requests get one token each, and nothing else
    happens.

    The scheduler sets ``max_steps``; the executor computes when each step begins and ends, and
    thereby their number. Steps in flight before the stretch finish first, so the steps that finish
    in the stretch are not the ones planned in it.

    ``slots``, ``generations`` and ``starts`` [requests] are those of the first plan, as in
    ``StepPlan``; ``starts`` grows by 1 per step. No step is planned at or after ``until`` (seconds
    on the engine's clock)."""

    step: int  # number of the first planned step
    rows: NDArray[np.intp]  # ascending
    slots: Column
    generations: Column
    starts: Column
    request_ids: list[str]  # by row; each gets one token per step, and all belong to one client
    freed_slots: list[int]  # sent to the worker with the first plan
    max_planned: int
    max_steps: int  # the most steps that are settled
    until: float
    begins: Times = field(default_factory=lambda: NO_TIMES)
    """[num_planned] seconds on the engine's clock at which each step was planned. The executor
    fills in this field and the next four."""
    ends: Times = field(default_factory=lambda: NO_TIMES)
    """[num_steps] seconds on that clock at which each step was settled: the time of its outputs."""
    seconds: Times = field(default_factory=lambda: NO_TIMES)
    """[num_steps] durations of the settled steps, as in ``StepResult.seconds``."""
    next_begin: float = 0.0
    """The time at which the step after the settled ones is planned, or can be."""
    token: int = 0
    """The token that every request got in every step; it ends no request."""
    growth: Growth = field(default_factory=Growth)
    """Filled in when the stretch is settled."""

    @property
    def num_steps(self) -> int:
        """The number of steps that finish during the stretch."""
        return len(self.ends)

    @property
    def num_planned(self) -> int:
        """The number of steps planned in the stretch, of which the last may end after it."""
        return len(self.begins)

    def plan(self, index: int) -> StepPlan:
        """The plan of the step at this index (from 0) of the stretch."""
        ones, growth = np.ones(len(self.rows), dtype=np.int32), self.growth
        first, last = bisect_left(growth.steps, index), bisect_right(growth.steps, index)
        groups = growth.groups[first:last]
        return StepPlan(
            step=self.step + index,
            rows=self.rows,
            slots=self.slots,
            generations=self.generations,
            starts=self.starts + np.int32(index),
            counts=ones,
            samples=ones,
            new=[],
            block_slots=self.slots[growth.places[first:last]] if first < last else EMPTY,
            block_indices=np.array(growth.indices[first:last], dtype=np.int32),
            block_ids=np.array(growth.blocks[first:last], dtype=np.int32),
            freed_slots=[] if index else self.freed_slots,
            num_tokens=len(ones),
            block_groups=np.array(groups, dtype=np.int32) if groups else None,
        )

    def plans(self) -> Iterator[StepPlan]:
        """The plans of all steps."""
        return map(self.plan, range(self.num_planned))

    def shape(self, index: int = 0, seconds: float = 0.0) -> StepShape:
        """The shape of the step at this index of the stretch, with ``seconds`` as its duration. A
        negative index means a step launched before the stretch."""
        count = len(self.rows)
        context = int(self.starts.sum(dtype=np.int64)) + index * count
        return StepShape(count, count, count, context, context + count, seconds)
