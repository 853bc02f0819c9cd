"""Experts in one tensor compute what experts one by one do."""

import pytest
import torch
from support.made_quantized import KINDS, Kind, make

from engine.layers.linear import PlainLinear
from engine.layers.quantized_linear import WeightOnlyLinear
from engine.layers.sublayers import GatedMLP, GroupedExperts, MixtureOfExperts, can_be_grouped
from engine.models.spec import MoESpec
from kernels.quantized import pack
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, compiling_for

ROUTING = MoESpec(num_experts=5, top_k=2, intermediate_size=12, renormalize=True)


def random_mixture(generator: torch.Generator, *, has_bias: bool = False) -> MixtureOfExperts:
    def linear(rows: int, columns: int) -> PlainLinear:
        bias = torch.zeros(rows) if has_bias else None
        return PlainLinear(torch.randn(rows, columns, generator=generator), bias)

    experts = [GatedMLP(linear(24, 8), linear(8, 12), "silu") for _ in range(5)]
    router = PlainLinear(torch.randn(5, 8, generator=generator), None)
    return MixtureOfExperts(router, experts, ROUTING)


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


def packed_mixture(kinds: list[Kind], device: str = "cpu") -> MixtureOfExperts:
    """An expert of each kind."""

    def linear(kind: Kind, rows: int, columns: int) -> WeightOnlyLinear:
        return WeightOnlyLinear(pack(make(kind, rows, columns)).to(device), None, torch.bfloat16)

    experts = [GatedMLP(linear(k, 256, 192), linear(k, 192, 128), "silu") for k in kinds]
    router = PlainLinear(torch.randn(len(kinds), 192, dtype=torch.bfloat16).to(device), None)
    return MixtureOfExperts(router, experts, ROUTING)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_host_learns_nothing_of_packed_experts(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """On tensors without numbers: who asks for one fails, as experts one by one do."""
    torch.manual_seed(seed)
    found = []
    monkeypatch.setattr(Launch, "run", lambda launch: found.append(launch.kernel.fn.__name__))
    x = torch.empty((30, 192), dtype=torch.bfloat16, device="meta")
    mixture = packed_mixture([kind] * 7, "meta")
    with compiling_for(DEVICES["sm_90"]):
        with pytest.raises(NotImplementedError):
            mixture(x)
        grouped = GroupedExperts(mixture)
        found.clear()
        assert grouped(x).shape == x.shape
    assert found == [
        "count_kernel",
        "place_kernel",
        "packed_experts_kernel",
        "act_mul_kernel",
        "packed_experts_kernel",
        "sum_kernel",
    ]


def test_experts_packed_in_different_ways_stay_apart(seed: int) -> None:
    torch.manual_seed(seed)
    assert can_be_grouped(packed_mixture([KINDS[0]] * 3))
    assert not can_be_grouped(packed_mixture([KINDS[0], KINDS[1]]))
