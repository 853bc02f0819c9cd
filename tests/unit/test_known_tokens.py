"""A stage refuses to compute a token that no plan has brought."""

from __future__ import annotations

import numpy as np
import pytest

from engine.messages.params import SamplingParams
from engine.messages.step import EMPTY, DraftPart, NewSeq, StepPlan
from engine.worker.known_tokens import KnownTokens


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def a_plan(
    start: int, count: int, token: int = -1, *, prompt: int = 0, drafts: int = 0
) -> StepPlan:
    new = [NewSeq("a", 3, [7] * prompt, prompt, SamplingParams(), 0, [], [])] if prompt else []
    plan = StepPlan(
        5, ints(0).astype(np.intp), ints(3), ints(0), ints(start), ints(count), ints(1),
        new, EMPTY, EMPTY, EMPTY, [], count,
    )  # fmt: skip
    plan.new_token_ids = None if token == -1 else ints(token)
    plan.drafts = DraftPart(ints(drafts), ints(*[9] * drafts)) if drafts else None
    return plan


def test_tokens_of_prompts_and_those_that_plans_bring_are_computed() -> None:
    known = KnownTokens(8)
    assert known.read(a_plan(0, 4, prompt=6)) is None
    assert known.read(a_plan(4, 2)) is None
    assert known.read(a_plan(6, 1, 11)).tolist() == [0]
    known.read(a_plan(7, 4, 12, drafts=3))
    known.read(a_plan(9, 1, 13))  # one of three drafts was accepted
    known.read(a_plan(2, 8, prompt=10))  # sent again after a preemption


@pytest.mark.parametrize(
    "plan",
    [
        a_plan(4, 3),  # beyond the prompt
        a_plan(6, 1),  # a sampled token, which is missing
        a_plan(7, 1, 12),  # after one that is missing
        a_plan(6, 2, 12),  # and one more
        a_plan(6, 3, drafts=2),
    ],
)
def test_a_token_that_no_plan_has_brought_is_refused(plan: StepPlan) -> None:
    known = KnownTokens(8)
    known.read(a_plan(0, 4, prompt=6))
    message = rf"step 5 computes position {plan.starts[0]} of slot 3, of which .* brought 6 tokens"
    with pytest.raises(RuntimeError, match=message):
        known.read(plan)
