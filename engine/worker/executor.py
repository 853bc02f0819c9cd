"""Runs plans in this process."""

from __future__ import annotations

import time
from typing import Any

from engine.errors import ConfigError
from engine.messages.step import Masks, StepPlan, StepResult, check_parts
from engine.worker.runner import ModelRunner


class InprocExecutor:
    """Computes a step when it is launched; on a CPU there is nobody to overlap with."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    capabilities: frozenset[str] = frozenset()

    def launch(self, plan: StepPlan) -> StepResult:
        """Compute the step; the result waits to be collected."""
        check_parts(plan, self.capabilities)
        start = time.perf_counter()
        result = self._runner.execute(plan)
        result.seconds = time.perf_counter() - start
        return result

    def collect(self, ticket: StepResult) -> StepResult:
        """The result of a launched step."""
        return ticket

    def sample(self, ticket: Any, masks: Masks | None) -> None:
        """No plan waits for masks: see ``capabilities``."""
        raise AssertionError("a step waits for masks, which this worker cannot read")

    def call(self, name: str, *args: Any) -> Any:
        """A method by name: there are none."""
        raise ConfigError(f"{name} is not available")

    def shutdown(self) -> None:
        """Let go of what was opened: nothing."""
