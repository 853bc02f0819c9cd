"""Kernels of batch-invariant steps agree with float64, and other rows change no bit of a row."""

import pytest
import torch
from support.paged_cache import Cache

from kernels import reference
from kernels.triton.invariant import invariant_linear
from kernels.triton.kv_write import write_launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Outputs and inputs: of no whole tile, of many, and of wide tiles.
SHAPES = [
    (7, 40),
    (200, 333),
    (64, 1024),
    pytest.param((17_000, 32), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_and_in_company(
    shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """Rows and weights are views of wider tensors, whose other columns are NaN."""
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
    # Each addition in float32 is off by at most 2**-24 of a partial sum, to either side; no partial
    # sum is larger than the largest output. Six standard deviations of that many such errors, and
    # then the rounding of the output. TF32 would be off by more than ten times as much.
    bound = 6 * (num_inputs / 3) ** 0.5 * 2**-24 + torch.finfo(dtype).eps / 2
    assert (together.double() - wanted).abs().max() <= bound * wanted.abs().max()
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
