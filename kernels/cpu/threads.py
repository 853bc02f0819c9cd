"""The one place that decides how many threads compute."""

from __future__ import annotations

import os

import torch

from kernels.cpu.team import TEAM


def set_threads(num: int | None = None) -> int:
    """Let torch and the compiled kernels use `num` threads; None: every core this process may use.

    Returns the number set. Torch's OpenMP threads and the helpers of kernels.cpu.team are two sets:
    where all that is large is ours, ``leave_threads_to_kernels`` keeps torch to one. Threads
    are not pinned to cores: a helper that lost its core is not waited for.
    """
    count = num or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    TEAM.num_threads = 0
    return count


def num_threads() -> int:
    """Threads of a compiled kernel that has work for all."""
    return TEAM.num_threads or torch.get_num_threads()


def leave_threads_to_kernels() -> None:
    """Torch computes nothing large from here on: its own threads would only spin next to ours."""
    TEAM.num_threads = num_threads()
    torch.set_num_threads(1)
