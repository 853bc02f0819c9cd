"""Estimate what it costs to divide a model among ranks: all-reduces within a stage, and hand-overs
from a stage to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALL_REDUCES = 2  # per layer: after attention, and after the MLP


@dataclass(frozen=True)
class Link:
    """A connection between devices."""

    bandwidth: float
    """Bytes per second that a device can send, and receive at the same time."""
    latency: float
    """Seconds of an all-reduce, or of a hand-over, of few bytes."""

    def all_reduce(self, num_ranks: int, num_bytes: float) -> float:
        """Seconds of an all-reduce of ``num_bytes``. Each rank sends almost all of them twice: to
        add up the parts, and to spread the sums."""
        if num_ranks == 1:
            return 0.0
        return self.latency + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bandwidth

    def hand_over(self, num_bytes: float) -> float:
        """Seconds until the next stage has ``num_bytes``."""
        return self.latency + num_bytes / self.bandwidth


def last_end(times: Sequence[Sequence[float]]) -> float:
    """Seconds until the last stage has computed the last micro-batch, if all are there at the
    start. times: seconds of each micro-batch in each stage [micro-batches, stages]."""
    ends = [0.0] * len(times[0])
    for batch in times:
        end = 0.0
        for stage, seconds in enumerate(batch):
            end = ends[stage] = max(end, ends[stage]) + seconds
    return ends[-1]


def cycle(times: Sequence[Sequence[float]]) -> float:
    """Seconds after which each micro-batch enters the first stage again, if it must have left the
    last one. times: as in ``last_end``."""
    longest_batch = max(map(sum, times))
    busiest_stage = max(map(sum, zip(*times, strict=True)))
    return max(longest_batch, busiest_stage)
