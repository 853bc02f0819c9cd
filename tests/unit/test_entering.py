"""What enters a stage is received once a step, whether or not a row needs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from unit.test_known_tokens import a_plan

from engine.parallel.channel import Ends, Receiver, Sender, Shape
from engine.worker.batches import PlanRows
from engine.worker.runner import Unfit
from engine.worker.stages import Entering, bytes_of, note_about

WIDTH, STEPS = 4, 3
SHAPE = Shape.of(8 * 4 * WIDTH, STEPS)


def connected() -> tuple[Sender, Entering]:
    memory = np.zeros(SHAPE.num_bytes, np.uint8)
    sender, source = (end(memory, Ends(0, 1), SHAPE) for end in (Sender, Receiver))
    machine: Any = SimpleNamespace(
        batches=SimpleNamespace(max_num_tokens=8),
        model=SimpleNamespace(dtype=torch.float32),
        platform=SimpleNamespace(zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype)),
    )
    return sender, Entering(machine, WIDTH, source)


def of(entering: Entering, plan: Any) -> torch.Tensor:
    return entering.of(PlanRows.of(plan, 100), plan.num_tokens)


def test_a_row_that_a_former_stage_lacks_fails_with_its_reason() -> None:
    sender, entering = connected()
    plan = a_plan(0, 2)
    plan.step = 0
    note = note_about({int(plan.slots[0]): "there is no memory"})
    sender.send(0, np.concatenate([bytes_of(torch.ones(plan.num_tokens, WIDTH)), note]))
    entering.begin(plan)
    with pytest.raises(Unfit, match="there is no memory"):
        of(entering, plan)
    fit = a_plan(0, 2)
    fit.step = 1
    sender.send(1, bytes_of(torch.ones(plan.num_tokens, WIDTH)))
    entering.begin(fit)
    assert of(entering, fit).sum() == plan.num_tokens * WIDTH


def test_states_that_no_row_needs_are_not_those_of_the_next_step() -> None:
    sender, entering = connected()
    plans = [a_plan(0, n) for n in (2, 3, 1)]
    sent = [torch.full((plan.num_tokens, WIDTH), 1.0 + step) for step, plan in enumerate(plans)]
    for step, (plan, states) in enumerate(zip(plans, sent, strict=True)):
        plan.step = step
        sender.send(step, bytes_of(states))
    for number in (0, 1):
        entering.begin(plans[number])
        entering.finish()
        entering.finish()
    entering.begin(plans[2])
    assert torch.equal(of(entering, plans[2]), sent[2])
