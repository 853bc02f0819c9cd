"""Ratios of two sides that are measured in turn, and their intervals."""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from measure import quantile

T = TypeVar("T")
NUM_DRAWS = 1000  # of the bootstrap


class Pair(NamedTuple):
    """Seconds of both sides in one turn."""

    other: list[float]
    ours: list[float]


def in_order(sides: dict[str, T], turn: int) -> dict[str, T]:
    """The sides, in reverse order in every other turn, so that drifts affect all alike."""
    return sides if turn % 2 == 0 else dict(reversed(sides.items()))


Estimate = Callable[[Sequence[Pair]], float]


def ratio_of_sums(pairs: Sequence[Pair]) -> float:
    return statistics.median(sum(pair.other) / sum(pair.ours) for pair in pairs)


def ratio_of(share: float) -> Estimate:
    """This quantile of each turn; the median over the turns."""
    return lambda pairs: statistics.median(
        quantile(pair.other, share) / quantile(pair.ours, share) for pair in pairs
    )


def ratio_to_the_end(pairs: Sequence[Pair]) -> float:
    """For loads that run to their end: the lower quartile of each step, summed over the steps.

    Two checkouts that plan other steps, or a load that ends elsewhere each time, cannot be
    compared by step: the sums are then.
    """
    if len({len(times) for pair in pairs for times in pair}) > 1:
        return ratio_of_sums(pairs)
    other, ours = (
        sum(quantile(step, 0.25) for step in zip(*(pair[side] for pair in pairs), strict=True))
        for side in (0, 1)
    )
    return other / ours


def estimate_for(kind: str, name: str) -> Estimate:
    if kind == "workloads":
        return ratio_of_sums
    if kind == "trips":
        return ratio_of(0.5)
    if name.startswith(("decode", "queue")):
        return ratio_of(0.25)
    return ratio_of_sums if name.startswith("hash") else ratio_to_the_end


def interval(pairs: Sequence[Pair], estimate: Estimate, seed: int = 1) -> tuple[float, float]:
    """95 % of the estimates from pairs that are drawn from these with replacement."""
    rng = random.Random(seed)
    drawn = sorted(estimate(rng.choices(pairs, k=len(pairs))) for _ in range(NUM_DRAWS))
    return drawn[int(0.025 * NUM_DRAWS)], drawn[int(0.975 * NUM_DRAWS) - 1]
