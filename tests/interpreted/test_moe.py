"""Mixtures of experts against a plain loop over tokens and experts."""

import pytest
import torch
from support.made_quantized import KINDS, Kind, make

from kernels.quantized import Packed, can_stack, pack, stack
from kernels.reference import grouped as reference
from kernels.triton import moe

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


def layer(num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple:
    gate_up = torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, inner) * inner**-0.5
    return gate_up.to(dtype), down.to(dtype)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("num_pairs", [1, 37, 2500])
def test_pairs_are_sorted_into_blocks(num_pairs: int, block: int) -> None:
    """Each block holds pairs of one group, ascending; every pair with a group is there once."""
    num_groups = 5
    chosen = torch.randint(-1, num_groups, (num_pairs,), dtype=torch.int32)
    chosen[chosen == 3] = 1  # a group without pairs
    groups = moe.align(chosen, num_groups, block)
    found = []
    for pairs, group in zip(
        groups.pairs.view(-1, block).tolist(), groups.block_groups.tolist(), strict=True
    ):
        if group >= 0:
            real = [pair for pair in pairs if pair < num_pairs]
            assert real and all(chosen[pair] == group for pair in real)
            assert pairs[len(real) :] == [num_pairs] * (block - len(real))
            found += [(group, pair) for pair in real]
    wanted = [(int(group), pair) for pair, group in enumerate(chosen) if group >= 0]
    assert found == sorted(wanted)


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "top_k", "act"),
    [
        (torch.float32, 1, 2, "silu"),
        (torch.float32, 21, 1, "gelu_tanh"),
        (torch.bfloat16, 9, 2, "silu"),
        (torch.float16, 70, 3, "gelu"),
    ],
)
def test_mixtures(dtype: torch.dtype, num_tokens: int, top_k: int, act: str) -> None:
    """Sizes that are no multiples of any tile."""
    num_experts, hidden, inner = 6, 80, 40
    gate_up, down = layer(num_experts, hidden, inner, dtype)
    gate_up[2] = torch.nan  # nobody's choice
    x = torch.randn(num_tokens, hidden).to(dtype)
    scores = torch.rand(num_tokens, num_experts)
    scores[:, 2] = -1
    weights, chosen = scores.topk(top_k)
    chosen = chosen.int()
    chosen[0, -1] = -1  # left out
    got = moe.mixture(x, gate_up, down, chosen, weights, act)
    wanted = reference.mixture(x.double(), gate_up.double(), down.double(), chosen, weights, act)
    assert got.dtype is dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_token_does_not_depend_on_its_company() -> None:
    gate_up, down = layer(4, 64, 32, torch.float32)
    x, weights = torch.randn(12, 64), torch.rand(12, 2)
    chosen = torch.rand(12, 4).topk(2).indices.int()
    together = moe.mixture(x, gate_up, down, chosen, weights, "silu")
    for row in (0, 7):
        one = slice(row, row + 1)
        alone = moe.mixture(x[one], gate_up, down, chosen[one], weights[one], "silu")
        assert torch.equal(alone, together[one])
    assert moe.mixture(x[:0], gate_up, down, chosen[:0], weights[:0], "silu").shape == (0, 64)


@pytest.mark.parametrize("rows", [64, 128])
def test_larger_tiles_multiply_alike(rows: int) -> None:
    """The tiles of long prompts, on few pairs."""
    x, matrices = torch.randn(30, 72).bfloat16(), torch.randn(3, 130, 72).bfloat16()
    chosen = torch.randint(0, 3, (30,), dtype=torch.int32)
    groups = moe.align(chosen, 3, rows)
    out = torch.full((30, 130), torch.nan)
    moe.experts_launch((x, matrices, out), groups, None, 1).run()
    wanted = torch.einsum("nh,noh->no", x.double(), matrices.double()[chosen.long()])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-3)


def packed_layer(kind: Kind, num_experts: int, hidden: int, inner: int) -> tuple[Packed, Packed]:
    made = [make(kind, 2 * inner, hidden) for _ in range(num_experts)]
    downs = [make(kind, hidden, inner) for _ in range(num_experts)]
    return stack(list(map(pack, made))), stack(list(map(pack, downs)))


SIZES = (
    (torch.float32, 9, 6, 2),
    (torch.bfloat16, 21, 6, 3),
    (torch.float16, 130, 3, 2),  # programs of 64 pairs
    (torch.bfloat16, 200, 3, 2),  # of 128
)


@pytest.mark.parametrize(
    ("kind", "dtype", "num_tokens", "num_experts", "top_k"),
    [
        pytest.param(
            *(kind, *sizes), id=f"{kind}-{place}", marks=[pytest.mark.slow] * (number % 4 != place)
        )
        for number, kind in enumerate(KINDS)
        for place, sizes in enumerate(SIZES)
    ],
)
def test_packed_experts(
    kind: Kind, dtype: torch.dtype, num_tokens: int, num_experts: int, top_k: int
) -> None:
    """Each expert has its own scales, zeros and order of inputs."""
    gate_up, down = packed_layer(kind, num_experts, hidden=192, inner=128)
    x = torch.randn(num_tokens, 192).to(dtype)
    weights, chosen = torch.rand(num_tokens, num_experts).topk(top_k)
    chosen = chosen.int()
    chosen[0, -1] = -1  # left out
    got = moe.mixture(x, gate_up, down, chosen, weights, "silu")
    wanted = reference.mixture(x.double(), gate_up, down, chosen, weights, "silu")
    assert got.dtype is dtype
    tolerance = float(TOLERANCE[dtype] * wanted.abs().max())
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)


def test_experts_of_which_one_has_its_inputs_in_another_order() -> None:
    sorted_kind = next(kind for kind in KINDS if kind.is_sorted and not kind.has_zeros)
    kinds = [sorted_kind, sorted_kind._replace(is_sorted=False)]
    made = [[pack(make(kind, *shape)) for kind in kinds] for shape in ((128, 96), (96, 64))]
    assert all(map(can_stack, made))
    gate_up, down = map(stack, made)
    x, weights = torch.randn(7, 96), torch.rand(7, 2)
    chosen = torch.tensor([[0, 1]] * 7, dtype=torch.int32)
    got = moe.mixture(x, gate_up, down, chosen, weights, "silu")
    wanted = reference.mixture(x.double(), gate_up, down, chosen, weights, "silu")
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    alone = reference.mixture(
        x.double(), *(stack([one[1]]) for one in made), chosen[:, :1] * 0, weights[:, 1:], "silu"
    )
    only_second = moe.mixture(x, gate_up, down, chosen[:, 1:], weights[:, 1:].contiguous(), "silu")
    torch.testing.assert_close(only_second.double(), alone, rtol=1e-4, atol=1e-4)


def test_plain_and_packed_matrices_of_a_layer() -> None:
    gate_up, _ = packed_layer(KINDS[0], 4, hidden=128, inner=64)
    down = torch.randn(4, 128, 64).bfloat16() * 0.1
    x, weights = torch.randn(160, 128).bfloat16(), torch.rand(160, 2)
    chosen = torch.rand(160, 4).topk(2).indices.int()
    got = moe.mixture(x, gate_up, down, chosen, weights, "silu")
    wanted = reference.mixture(x.double(), gate_up, down.double(), chosen, weights, "silu")
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-2 * float(wanted.abs().max()))
