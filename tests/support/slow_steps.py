"""A policy with which a small model writes as slowly as a large one."""

import time

from engine.sched.policies import FCFS

SECONDS = 0.01  # at the end of each step


class SlowSteps(FCFS):
    def on_step(self, shape, view):
        time.sleep(SECONDS)
