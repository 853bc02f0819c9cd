"""Layers of a model are divided into stages of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from engine.errors import ConfigError
from engine.models.stages import given_parts, split_layers


@pytest.mark.parametrize(
    ("layers", "ends", "count", "wanted"),
    [
        ([1.0] * 8, (0.0, 0.0), 2, [4, 4]),
        ([1.0] * 7, (0.0, 0.0), 3, [2, 2, 3]),
        ([1.0] * 8, (2.0, 2.0), 2, [4, 4]),
        ([1.0] * 8, (0.0, 4.0), 2, [6, 2]),
        ([1.0] * 8, (3.0, 3.0), 4, [1, 3, 3, 1]),
        ([1.0] * 3, (9.0, 9.0), 3, [1, 1, 1]),
        ([4.0, 1.0, 1.0, 1.0, 1.0], (0.0, 0.0), 2, [1, 4]),
        ([1.0] * 5, (0.0, 0.0), 1, [5]),
    ],
)
def test_stages_have_weights_of_nearly_equal_size(
    layers: list[float], ends: tuple[float, float], count: int, wanted: list[int]
) -> None:
    assert [len(part) for part in split_layers(layers, ends, count)] == wanted


def test_no_other_division_has_a_smaller_largest_stage(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        num = draw.randint(1, 9)
        layers = [float(draw.randint(1, 9)) for _ in range(num)]
        ends = float(draw.randint(0, 20)), float(draw.randint(0, 20))
        count = draw.randint(1, num)
        parts = split_layers(layers, ends, count)
        assert [index for part in parts for index in part] == list(range(num))
        best = min(
            (max(found), sum(size**2 for size in found))
            for inner in combinations(range(1, num), count - 1)
            if (found := sizes((0, *inner, num), layers, ends))
        )
        mine = sizes((0, *(part.stop for part in parts)), layers, ends)
        assert (max(mine), sum(size**2 for size in mine)) == best


def sizes(bounds: Sequence[int], layers: list[float], ends: tuple[float, float]) -> list[float]:
    found = [sum(layers[first:upto]) for first, upto in pairwise(bounds)]
    found[0] += ends[0]
    found[-1] += ends[1]
    return found


def test_divisions_that_are_impossible_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel_size is 4, and the model has 3 lay.*3"
    ):
        split_layers([1.0] * 3, (0.0, 0.0), 4)
    with pytest.raises(
        ConfigError, match=r"split is 2, 2, 3, and the model has 8 layers.* sum is 8"
    ):
        given_parts((2, 2, 3), 8)
    assert given_parts((2, 5, 1), 8) == [range(2), range(2, 7), range(7, 8)]
