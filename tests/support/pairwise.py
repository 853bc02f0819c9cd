"""Few cases in which every two values of two factors meet at least once."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], tries: int = 30) -> list[Case]:
    """Greedy: of some random cases through a pair still open, the one that closes most pairs.

    The same factors give the same cases.
    """
    dice = random.Random(0)
    names = list(factors)
    # Values are named by their index: they need not be hashable.
    still = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while still:
        must = dict(min(still))
        drawn = [
            {name: dice.randrange(len(factors[name])) for name in names} | must
            for _ in range(tries)
        ]
        best = max(drawn, key=lambda case: len(_pairs(case) & still))
        still -= _pairs(best)
        cases.append({name: factors[name][i] for name, i in best.items()})
    return cases


def _pairs(case: Mapping[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(itertools.combinations(case.items(), 2))
