"""Experts in one tensor compute what experts one by one do."""

import pytest
import torch

from engine.layers.linear import PlainLinear
from engine.layers.sublayers import GatedMLP, GroupedExperts, MixtureOfExperts, can_be_grouped


def random_mixture(generator: torch.Generator, *, has_bias: bool = False) -> MixtureOfExperts:
    def linear(rows: int, columns: int) -> PlainLinear:
        bias = torch.zeros(rows) if has_bias else None
        return PlainLinear(torch.randn(rows, columns, generator=generator), bias)

    experts = [GatedMLP(linear(24, 8), linear(8, 12), "silu") for _ in range(5)]
    router = PlainLinear(torch.randn(5, 8, generator=generator), None)
    return MixtureOfExperts(router, experts, 2, True)


def test_grouped_experts_agree_with_single_ones(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mixture = random_mixture(generator)
    x = torch.randn(7, 8, generator=generator)
    wanted = mixture(x)
    assert can_be_grouped(mixture) and not mixture.can_be_recorded
    grouped = GroupedExperts(mixture)
    assert grouped.can_be_recorded
    torch.testing.assert_close(grouped(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_with_biases_stay_apart(has_bias: bool, seed: int) -> None:
    mixture = random_mixture(torch.Generator().manual_seed(seed), has_bias=has_bias)
    assert can_be_grouped(mixture) != has_bias
