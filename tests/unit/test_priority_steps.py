"""A pooled request shares its step with no request of a worse priority."""

from __future__ import annotations

from typing import Any

from support.simulate import make_request, make_run

from engine.config.sched import SchedulerOptions
from engine.core.build import features_of
from engine.messages.pooling import PoolingParams
from engine.sched.priority_steps import PrioritySteps

POOLED = PoolingParams()


def planned(arrivals: list[tuple[str, int]], **fields: Any) -> list[list[str]]:
    """The requests of each step; ``arrivals``: names and priorities."""
    run = make_run(policy="priority", resources=(PrioritySteps(),), max_num_batched_tokens=16)
    for name, priority in arrivals:
        run.add(make_request(name, [1, 2, 3, 4], max_tokens=1, priority=priority, **fields))
    while run.scheduler.has_unfinished_requests():
        run.launch()
        run.settle()
    return [sorted(plan) for plan in run.plans if plan]


def test_texts_wait_for_the_step_after_a_query() -> None:
    burst = [(f"t{i}", 1) for i in range(6)]
    steps = planned([*burst, ("q", 0)], pooling=POOLED)
    assert steps == [["q"], ["t0", "t1", "t2", "t3"], ["t4", "t5"]]


def test_generated_text_is_planned_as_before() -> None:
    steps = planned([("a", 1), ("b", 1), ("q", 0)])
    assert steps == [["a", "b", "q"]]


def test_only_the_policy_that_reads_priorities_separates_them() -> None:
    for policy, count in (("priority", 1), ("fcfs", 0)):
        found = features_of(SchedulerOptions(scheduling_policy=policy))
        assert sum(isinstance(each, PrioritySteps) for each in found) == count
