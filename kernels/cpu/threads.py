"""Sets the number of computing threads."""

from __future__ import annotations

import os

import torch

from kernels.cpu.team import TEAM


def set_threads(num: int | None = None) -> int:
    """Let torch and compiled kernels use `num` threads; None: one for each core of this process.
    Returns the number of threads."""
    count = num or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    TEAM.num_threads = 0
    return count


def num_threads() -> int:
    """Returns the number of threads that a large compiled kernel uses."""
    return TEAM.num_threads or torch.get_num_threads()


def leave_threads_to_kernels() -> None:
    """Limit torch to one thread, so that its threads do not compete with those of compiled
    kernels."""
    TEAM.num_threads = num_threads()
    torch.set_num_threads(1)
