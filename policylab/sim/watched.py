"""A timed worker that records what was decided."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.messages.step import Column, StepPlan
from engine.sched.predict.cost import StepShape
from policylab.sim.history import ProcessedWork
from policylab.sim.jumps.blocks import RepeatingKV
from policylab.sim.jumps.stretch import Stretch
from policylab.sim.kv_groups import KVPeaks
from policylab.sim.worker import Launched, TimedWorker


class Watched(TimedWorker):
    """A worker that also computes a hash of all scheduling decisions and, if ``keeps_steps``,
    records each step."""

    def __init__(self, *args: Any, kv: RepeatingKV, keeps_steps: bool) -> None:
        super().__init__(*args)
        self._kv = kv
        self.work = ProcessedWork(len(self._ends)) if keeps_steps else None
        self.steps: list[tuple[float, ...]] | None = [] if keeps_steps else None
        self._hash = hashlib.blake2b(digest_size=16)
        self._same = b""  # which slots computed how many tokens in the latest step
        self._num_same = 0  # consecutive steps with the same decisions
        self.kv_peaks = KVPeaks(kv.groups)
        """The most KV blocks in use while a step was computed."""

    @property
    def decisions(self) -> str:
        """A hash of all scheduling decisions: which requests computed how many tokens in each
        step."""
        self._close()
        return self._hash.hexdigest()

    def launch(self, plan: StepPlan) -> Launched:
        for new in plan.new:
            self._close()
            self._hash.update(f"{new.slot}={new.request_id}\n".encode())
        if plan.num_tokens:
            self._decided(plan.slots, plan.counts)
            self.kv_peaks.note(self._kv)  # during a step the usage only grows
        launched = super().launch(plan)
        if self.work is not None:
            self.work.computed(plan)
        if self.steps is not None and plan.num_tokens:
            self._keep(plan, launched)
        return launched

    def repeated(
        self, stretch: Stretch, launched: Sequence[float], seconds: Sequence[float]
    ) -> None:
        self._decided(stretch.slots, np.ones_like(stretch.slots), stretch.num_planned)

    def _decided(self, slots: Column, counts: Column, num_steps: int = 1) -> None:
        decided = slots.tobytes() + counts.tobytes()
        if decided != self._same:
            self._close()
            self._same = decided
        self._num_same += num_steps

    def _close(self) -> None:
        if self._num_same:
            self._hash.update(self._same)
            self._hash.update(b"x%d\n" % self._num_same)
        self._num_same, self._same = 0, b""

    def _keep(self, plan: StepPlan, launched: Launched) -> None:
        assert self.steps is not None
        shape = StepShape.of(plan, 0.0)
        start = launched.ends_at - launched.result.seconds
        sizes = (shape.num_seqs, shape.num_tokens, shape.num_decodes, shape.context)
        self.steps.append((start, launched.ends_at, *sizes, shape.attention, self._kv.usage))
