"""Real runs: requests end at the lengths that were drawn, and the engine is told what jobs ask."""

from __future__ import annotations

import numpy as np
import pytest
from support.simulate import make_request, make_run

from engine.errors import ConfigError
from engine.messages.step import StepPlan, StepResult
from policylab.sim.real import OTHER, STOP, ForcedLengths, engine_args
from policylab.sim.run import Engine
from policylab.sim.workloads import find_workload
from policylab.verify.fake import FakeExecutor


class Says(FakeExecutor):
    """Gives these tokens, so many of each row."""

    def __init__(self, tokens: list[int], counts: list[int]) -> None:
        self.tokens, self.counts = tokens, counts

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, ticket: StepPlan) -> StepResult:
        tokens, counts = (np.array(v, dtype=np.int32) for v in (self.tokens, self.counts))
        return StepResult(ticket.step, tokens, counts)


def first_plan() -> StepPlan:
    """Prompts of three requests."""
    run = make_run()
    for name in "abc":
        run.add(make_request(f"0/{name}", [1, 2, 3], 9))
    return run.scheduler.schedule()


@pytest.mark.parametrize(
    ("drawn", "counts", "given"),
    [
        ([7, 7, 7], [1, 1, 1], [7, STOP, 7]),  # the second is to have one token
        ([STOP, 7, 7], [1, 1, 1], [OTHER, STOP, 7]),  # the model would have ended the first
        ([7, 7], [0, 1, 1], [STOP, 7]),  # the first has failed
        ([7, STOP], [1, 0, 1], [7, OTHER]),
    ],
)
def test_only_lengths_end_a_request(drawn: list[int], counts: list[int], given: list[int]) -> None:
    lengths = {"a": 2, "b": 1, "c": 2}
    forced = ForcedLengths(Says(drawn, counts), 8, lengths)
    assert forced.collect(forced.launch(first_plan())).token_ids.tolist() == given


def test_drafts_are_refused() -> None:
    forced = ForcedLengths(Says([7] * 4, [2, 1, 1]), 8, {})
    with pytest.raises(ConfigError, match="leave speculative decoding out"):
        forced.collect(forced.launch(first_plan()))


def test_weights_of_users_reach_a_policy_that_uses_them() -> None:
    workload = find_workload('log-uniform(users="ann(share=3),bob(weight=2)")')
    weights = [engine_args(name, workload, Engine()).user_weights for name in ("vtc", "fcfs")]
    assert weights == [workload.user_weights, {}] and weights[0]["bob"] == 2.0
