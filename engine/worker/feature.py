"""Feature: the half of a feature that computes. Each reads one part of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.layers.batch import ForwardBatch
from engine.messages.step import StepPlan, StepResult
from engine.worker.batches import PlanRows
from engine.worker.live import LiveSeqs


class Feature:
    """Adapters, media, KV from elsewhere: what they do to a step. Every hook but ``part`` has a
    default; a step that is run again in halves is extended again."""

    part = ""  # name of the plan's field that it reads (``engine.messages.step.PARTS``)
    aux_layers: tuple[int, ...] = ()  # whose outputs ``extend`` asks for, by setting the batch's

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """What clients may call by name, as to load an adapter."""
        return {}

    def begin(self, plan: StepPlan, live: LiveSeqs) -> None:
        """A plan has come, maybe without rows: its part is ``getattr(plan, self.part)``."""

    def touches(self, rows: PlanRows) -> bool:
        """Does ``extend`` change anything for these rows? Then no recorded graph computes them."""
        return False

    def extend(self, batch: ForwardBatch, rows: PlanRows) -> None:
        """Add vectors, adapters, positions or layers wanted to the forward pass of these rows."""

    def report(self, result: StepResult) -> None:
        """A step is collected: add what the scheduler's half is to learn."""

    def shutdown(self) -> None:
        """Let go of what was opened."""
