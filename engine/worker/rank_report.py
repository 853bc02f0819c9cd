"""What ranks report at the start: where they compute, their memory, and what a sum takes."""

from __future__ import annotations

import logging
import os
import socket
import statistics
import time

import torch

from engine.config.env import interprets_cuda, visible_gpus
from engine.ipc.host_memory import resident_bytes
from engine.parallel.collectives import Collectives
from engine.worker.platform import Platform
from engine.worker.rank import RankPlace

SUMS = (4 << 10, 64 << 10)  # bytes of the tensors whose sum is timed
NUM_SUMS = 20

logger = logging.getLogger("engine.core")


def place_of(platform: Platform) -> RankPlace:
    """Where this process computes, and the memory that it uses."""
    used = 0
    if not platform.shares_memory:
        free, total = platform.free_and_total()
        used = total - free
    device = name_of_device(platform)
    return RankPlace(socket.gethostname(), os.getpid(), device, resident_bytes(), used)


def name_of_device(platform: Platform) -> str:
    """The processors of this process, such as ``CPUs 0-3``, or its GPU."""
    if platform.device.type == "cuda" and not interprets_cuda():
        number = visible_gpus(torch.cuda.device_count())[0]
        return f"GPU {number}, {torch.cuda.get_device_name(platform.device)}"
    numbers = sorted(os.sched_getaffinity(0))
    starts = [each for each in numbers if each - 1 not in numbers]
    ends = [each for each in numbers if each + 1 not in numbers]
    spans = zip(starts, ends, strict=True)
    return "CPUs " + ",".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


def log_sums(ranks: Collectives, platform: Platform) -> None:
    """Log how long the ranks take to add up small tensors. All ranks call it; rank 0 logs."""
    found = []
    for num_bytes in SUMS:
        x, times = torch.zeros(num_bytes // 4, device=platform.device), []
        for _ in range(NUM_SUMS):  # the first ones also connect devices
            ranks.barrier()
            began = time.perf_counter()
            ranks.all_reduce(x)
            platform.mark().synchronize()
            times.append(time.perf_counter() - began)
        found.append(f"{num_bytes >> 10} KiB in {1e6 * statistics.median(times):.1f} us")
    if ranks.rank == 0:
        logger.info("%d ranks add up %s", ranks.size, ", ".join(found))
