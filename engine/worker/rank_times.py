"""Measures how long the ranks of a group take to add up vectors."""

from __future__ import annotations

import logging
import statistics
import time

import torch

from engine.parallel.collectives import Collectives

ROWS = (1, 32, 512)
ROUNDS = 15  # the first ones also connect devices

logger = logging.getLogger("engine.worker")


def log_all_reduce(
    ranks: Collectives, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Log what the sum of the hidden states of some tokens takes. All ranks must call this, with
    the same arguments; rank 0 logs."""
    medians = [all_reduce_seconds(ranks, rows * hidden_size, dtype, device) for rows in ROWS]
    if ranks.rank == 0:
        logger.info(
            "%d ranks add up the vectors of %d, %d and %d tokens in %.1f, %.1f and %.1f us",
            *(ranks.size, *ROWS, *(1e6 * seconds for seconds in medians)),
        )


def all_reduce_seconds(
    ranks: Collectives, num: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Median seconds of the sum of ``num`` elements. All ranks must call this."""
    x, times = torch.zeros(num, dtype=dtype, device=device), []
    for _ in range(ROUNDS):
        ranks.barrier()
        begin = time.perf_counter()
        ranks.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
