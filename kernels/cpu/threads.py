"""The one place that decides how many threads compute."""

from __future__ import annotations

import os

import torch


def set_threads(num: int | None = None) -> int:
    """Let torch and the compiled kernels use `num` threads; None: every core this process may use.

    Returns the number set. Torch's OpenMP threads and the helpers of kernels.cpu.team are two sets,
    but a float32 decoder's step gives torch nothing large enough to wake its own, and helpers sleep
    soon after work ends. Nobody is bound to a core: a helper that lost its core is not waited for.
    """
    count = num or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count
