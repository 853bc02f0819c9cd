"""What a rank has spent the time of its steps with: computing, or waiting for other ranks.

Each rank counts by itself, and shows the counts in memory that the core reads for its statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Waited(NamedTuple):
    """Nanoseconds in which a rank has waited for others since its process started.

    ``operations``: in operations that ranks do together; ``stages``: for the hidden states of the
    stage before, or in the first stage of a pipeline for the results of the last."""

    operations: int = 0
    stages: int = 0


class StepTimes(NamedTuple):
    """Nanoseconds of a rank since its engine was ready.

    ``steps``: in steps; ``operations`` and ``stages``: see ``Waited``."""

    steps: int = 0
    operations: int = 0
    stages: int = 0


class StepClock:
    """Adds up the times of a rank's steps. waited: returns what it has waited so far."""

    def __init__(self, waited: Callable[[], Waited]) -> None:
        self._waited = waited
        self._before = Waited()
        self._seconds = 0.0

    def begin(self) -> None:
        """Count from now on: the engine is ready."""
        self._before, self._seconds = self._waited(), 0.0

    def add(self, seconds: float) -> None:
        """Add a step, from its begin to its end on this rank's device."""
        self._seconds += seconds

    def read(self) -> StepTimes:
        now, before = self._waited(), self._before
        operations, stages = (each - was for each, was in zip(now, before, strict=True))
        return StepTimes(round(self._seconds * 1e9), operations, stages)
