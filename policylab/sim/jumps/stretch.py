"""Stretch: steps that repeat, on one page for scheduler and executor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import EMPTY, Column, StepPlan
from engine.sched.predict.cost import StepShape

Times = NDArray[np.float64]
NO_TIMES: Times = np.empty(0)


@dataclass(eq=False, slots=True)
class Growth:
    """Blocks that steps of a stretch take, in the order in which they take them."""

    steps: list[int] = field(default_factory=list)  # 0 for the first step of the stretch
    places: list[int] = field(default_factory=list)  # of the request among the stretch's
    indices: list[int] = field(default_factory=list)  # in the request's block table
    blocks: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Stretch:
    """Steps that repeat: the same requests, one token each, and nothing else happens.

    The scheduler's side decides which steps they are and how many there may be at most, the
    executor how long each takes and therefore how many there are (``num_steps``); then they are
    settled in one pass. All is as if each of them had been planned, computed and settled by itself.
    With several steps in flight, the steps planned in a stretch are not the same as those settled
    in it. One more may be planned than settled: the next one, which may end requests.

    ``slots``, ``generations`` and ``starts`` are those of the first plan, as in ``StepPlan``; each
    later one starts a token further. ``until``: seconds on the engine's clock; no step is planned
    at that time or later.
    """

    step: int  # number of the first one planned
    rows: NDArray[np.intp]  # ascending
    slots: Column
    generations: Column
    starts: Column
    request_ids: list[str]  # by row; each gets one token in each step, all by one client
    freed_slots: list[int]  # of which the first plan informs the worker
    max_planned: int
    max_steps: int  # that are settled
    until: float
    begins: Times = field(default_factory=lambda: NO_TIMES)
    """[num_planned] seconds on the engine's clock at which each step was planned. Filled in by the
    executor, as are the next four."""
    ends: Times = field(default_factory=lambda: NO_TIMES)
    """[num_steps] seconds on that clock at which each was settled: the time of its outputs."""
    seconds: Times = field(default_factory=lambda: NO_TIMES)
    """[num_steps] of the steps settled, as ``StepResult.seconds``."""
    next_begin: float = 0.0
    """When the step after those settled is planned, or can be."""
    token: int = 0
    """What every request got in every step; it ends none of them."""
    growth: Growth = field(default_factory=Growth)
    """Filled in when the stretch is settled, as is the next."""
    kv_usage: float = 0.0
    """Share of the KV pool in use after the last step that was planned: the most of all."""

    @property
    def num_steps(self) -> int:
        """How many steps were settled."""
        return len(self.ends)

    @property
    def num_planned(self) -> int:
        """How many steps were planned: as many, or one more."""
        return len(self.begins)

    def plan(self, index: int) -> StepPlan:
        """The plan of one of its steps, from 0 on, as it would have been made alone."""
        ones, growth = np.ones(len(self.rows), dtype=np.int32), self.growth
        first, last = bisect_left(growth.steps, index), bisect_right(growth.steps, index)
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
        )

    def plans(self) -> Iterator[StepPlan]:
        """All plans, one by one."""
        return map(self.plan, range(self.num_planned))

    def shape(self, index: int = 0, seconds: float = 0.0) -> StepShape:
        """Sizes of one of its steps; below 0, of a step of the same rows planned before it."""
        count = len(self.rows)
        context = int(self.starts.sum(dtype=np.int64)) + index * count
        return StepShape(count, count, count, context, context + count, seconds)
