"""What a batch-invariant step is made of: beside float64, and to the last bit in any company."""

import pytest
import torch
from support.paged_cache import Cache

from kernels import reference
from kernels.triton.invariant import invariant_linear
from kernels.triton.kv_write import write_launch

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Outputs and inputs: of no whole tile, of many, and of wide tiles.
SHAPES = [(7, 40), (200, 333), (64, 1024), (17_000, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_is_the_same_alone_and_in_company(
    shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """Rows and weights lie in wider tensors: what is beside them is NaN."""
    num_outputs, num_inputs = shape
    rng = torch.Generator().manual_seed(seed)

    def made(num: int) -> torch.Tensor:
        wide = torch.full((num, num_inputs + 8), float("nan"), dtype=dtype)
        wide[:, :num_inputs] = torch.randn(num, num_inputs, generator=rng).to(dtype)
        return wide[:, :num_inputs]

    weight, x = made(num_outputs), made(70 if num_outputs < 1000 else 4)
    bias = torch.randn(num_outputs, generator=rng).to(dtype) if num_inputs > 40 else None
    together = invariant_linear(x, weight, bias)
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert together.shape == (len(x), num_outputs) and together.dtype is dtype
    assert (together.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
    for first, end in ((0, 1), (3, 4), (1, 4), (0, 17), (5, 69)):
        assert torch.equal(invariant_linear(x[first:end], weight, bias), together[first:end])


def test_no_row_is_nothing_to_do() -> None:
    assert invariant_linear(torch.zeros(0, 16), torch.zeros(8, 16), None).shape == (0, 8)


def test_inputs_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="of one dtype"):
        invariant_linear(torch.zeros(2, 16), torch.zeros(8, 16).bfloat16(), None)


def test_heads_are_normalised_by_one_kernel_for_any_number_of_tokens(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    heads, norm = (4, 2, 64), reference.HeadNorm(torch.ones(64), torch.ones(64), 1e-6, False)
    kernels = []
    for num_tokens in (1, 200):
        cache = Cache(((num_tokens, 3),), heads[1:], rng)
        cache.meta.batch_invariant = True
        qkv, q = torch.zeros(num_tokens, 8 * 64), torch.zeros(num_tokens, 4, 64)
        variant = (reference.Rope(None, False), norm, None)
        launch = write_launch(qkv, cache.kv, cache.meta, heads, variant, q)
        kernels.append((launch.args["S"], launch.num_warps))
    assert kernels[0] == kernels[1]
