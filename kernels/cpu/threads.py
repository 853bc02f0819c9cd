"""The one place that decides how many threads compute."""

from __future__ import annotations

import os

import torch


def set_threads(num: int | None = None) -> int:
    """Let torch and the compiled kernels use `num` threads; None: every core this process may use.

    Call it once, before the first operation. Returns the number set.
    """
    count = num or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count
