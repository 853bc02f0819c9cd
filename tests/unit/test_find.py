"""A policy is made once, before the model is loaded, and is the one that schedules."""

from __future__ import annotations

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.sched.find import choose, make_scheduler
from engine.sched.policies.fcfs import FCFS


class Counted(FCFS):
    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1


def test_what_was_chosen_is_not_made_again():
    config = SchedulerConfig(scheduling_policy=Counted)
    chosen = choose(config)
    scheduler = make_scheduler(config, KVManager(8, 4), clock=lambda: 0.0, chosen=chosen)
    assert scheduler.policy is chosen.policy
    assert Counted.num_made == 1
