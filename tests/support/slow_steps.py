"""Policies with which a small model writes as slowly as a large one."""

import os
import time

from engine.sched.policies import FCFS

SECONDS = 0.01  # at the end of each step
GATE_SECONDS = 0.05
GATE = "METRONOME_TEST_GATE"  # variable with the path of a file


class SlowSteps(FCFS):
    def on_step(self, shape, view):
        time.sleep(SECONDS)


class GatedSteps(FCFS):
    """Steps are slow until a file is removed."""

    def on_step(self, shape, view):
        if os.path.exists(os.environ[GATE]):
            time.sleep(GATE_SECONDS)
