"""Runs plans in this process."""

from __future__ import annotations

import time

from engine.messages.step import StepPlan, StepResult
from engine.worker.runner import ModelRunner


class InprocExecutor:
    """Computes a step when it is launched; on a CPU there is nobody to overlap with."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> StepResult:
        """Compute the step; the result waits to be collected."""
        start = time.perf_counter()
        result = self._runner.execute(plan)
        result.seconds = time.perf_counter() - start
        return result

    def collect(self, ticket: StepResult) -> StepResult:
        """The result of a launched step."""
        return ticket
