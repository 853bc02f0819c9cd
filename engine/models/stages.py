"""Stages of a pipeline: each has adjacent layers of a model. Does not import torch.

The first stage has the embedding as well, the last one the final norm and the output layer. A table
that both of them use is on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from engine.errors import ConfigError
from engine.models.spec import DecoderSpec
from engine.models.targets import Target, targets


@dataclass(frozen=True)
class Pipeline:
    """Which stage of how many a worker computes."""

    index: int = 0
    count: int = 1
    layer_split: tuple[int, ...] = ()
    """Number of layers of each stage; (): chosen by the size of the weights."""

    def stage(self, spec: DecoderSpec, num_bytes: Callable[[Target], float]) -> Stage:
        """This stage of a model. num_bytes: size of a tensor. Raises ``ConfigError`` if the model
        cannot be divided in this way."""
        if self.count == 1:
            return Stage(0, 1, range(len(spec.layers)))
        if self.layer_split:
            parts = given_parts(self.layer_split, len(spec.layers))
        else:
            parts = split_layers(*sizes_of(spec, num_bytes), self.count)
        return Stage(self.index, self.count, parts[self.index])


@dataclass(frozen=True)
class Stage:
    """A stage of a model."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        """True if it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if it has the final norm and the output layer."""
        return self.index == self.count - 1

    def has(self, spec: DecoderSpec, target: str) -> bool:
        """True if a target with this name belongs to the stage."""
        layer = target.partition(".")[0]
        if layer.isdigit():
            return int(layer) in self.layers
        if target == "embed":
            return self.is_first or (self.is_last and spec.tied)
        return self.is_last


def sizes_of(
    spec: DecoderSpec, num_bytes: Callable[[Target], float]
) -> tuple[list[float], tuple[float, float]]:
    """Bytes of each layer, and what is added to the first and to the last stage."""
    layers, ends = [0.0] * len(spec.layers), [0.0, 0.0]
    for target in targets(spec):
        layer, size = target.name.partition(".")[0], num_bytes(target)
        if layer.isdigit():
            layers[int(layer)] += size
            continue
        ends[0] += size * (target.name == "embed")
        ends[1] += size * (target.name != "embed" or spec.tied)
    return layers, (ends[0], ends[1])


def given_parts(split: Sequence[int], num_layers: int) -> list[range]:
    """The layers of each stage for ``pipeline_layer_split``, positive numbers. Raises
    ``ConfigError`` unless their sum is that of all layers."""
    if sum(split) != num_layers:
        raise ConfigError(
            f"pipeline_layer_split is {', '.join(map(str, split))}, and the model has {num_layers} "
            f"layers: give numbers whose sum is {num_layers}, or leave it out, and layers are "
            "divided by the size of their weights"
        )
    return [range(*pair) for pair in pairwise(accumulate(split, initial=0))]


def check_count(count: int, num_layers: int) -> None:
    """Raise ``ConfigError`` if there are fewer layers than stages."""
    if count > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {count}, and the model has {num_layers} layers: each stage "
            f"needs one, so use at most {num_layers}"
        )


def split_layers(layers: Sequence[float], ends: tuple[float, float], count: int) -> list[range]:
    """Divide layers among ``count`` stages: the largest stage is as small as possible, and of such
    divisions the one whose sizes are nearest to each other is chosen.

    layers: size of each layer; ends: sizes added to the first and last stage. Raises
    ``ConfigError`` if there are fewer layers than stages."""
    num = len(layers)
    check_count(count, num)
    if count == 1:
        return [range(num)]
    before = list(accumulate(layers, initial=0.0))

    def size(stage: int, first: int, upto: int) -> float:
        extra = ends[0] * (stage == 0) + ends[1] * (stage == count - 1)
        return before[upto] - before[first] + extra

    largest = best_division(num, count, size, max)[0]

    def allowed(stage: int, first: int, upto: int) -> float:
        found = size(stage, first, upto)
        return found**2 if found <= largest else float("inf")

    return best_division(num, count, allowed, lambda *parts: sum(parts))[1]


def best_division(
    num: int,
    count: int,
    cost: Callable[[int, int, int], float],
    joined: Callable[[float, float], float],
) -> tuple[float, list[range]]:
    """Divide ``num`` layers into adjacent parts, at least one layer each, at the lowest cost.

    cost: of a stage, from its number, first layer and end; joined: the cost of two parts together.
    Returns the lowest cost, and the parts."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # by the end of the stages so far
    for stage in range(count):
        ends = range(stage + 1, num - (count - stage - 1) + 1)
        best = {
            upto: min(
                (joined(paid, cost(stage, first, upto)), [*bounds, upto])
                for first, (paid, bounds) in best.items()
                if first < upto
            )
            for upto in (ends if stage < count - 1 else [num])
        }
    lowest, bounds = best[num]
    return lowest, [range(*pair) for pair in pairwise(bounds)]
