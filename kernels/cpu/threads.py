"""Sets the number of computing threads."""

from __future__ import annotations

import os

import torch

from kernels.cpu.team import TEAM


def set_threads(num: int | None = None) -> int:
    """Let torch and compiled kernels use `num` threads; None: one for each core of this process.
    Returns the number of threads.

    Torch's OpenMP threads and the helpers of kernels.cpu.team are separate; if all large operations
    are ours, ``leave_threads_to_kernels`` limits torch to one. Threads are not pinned to cores.
    """
    count = num or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    TEAM.num_threads = 0
    return count


def num_threads() -> int:
    """Number of threads of a large compiled kernel."""
    return TEAM.num_threads or torch.get_num_threads()


def leave_threads_to_kernels() -> None:
    """Limit torch to one thread, since its threads would only compete with our helpers."""
    TEAM.num_threads = num_threads()
    torch.set_num_threads(1)
