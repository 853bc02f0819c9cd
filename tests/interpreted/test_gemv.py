"""One row times a matrix, beside the product in float64."""

import pytest
import torch

from kernels.ops import is_one_row
from kernels.triton.gemv import matvec

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(64, 1024), (7, 40), (33, 1029), (130, 3000), (9, 9000)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(shape: tuple[int, int], dtype: torch.dtype, has_bias: bool, seed: int) -> None:
    """Sizes that fill no tile, and rows of a wider matrix: what lies beside them is NaN."""
    rng = torch.Generator().manual_seed(seed)
    wide = torch.full((shape[0], shape[1] + 8), float("nan"), dtype=dtype)
    weight = wide[:, : shape[1]]
    weight.copy_(torch.randn(shape, generator=rng))
    x = torch.randn(1, shape[1], generator=rng).to(dtype)
    bias = torch.randn(shape[0], generator=rng).to(dtype) if has_bias else None
    assert is_one_row(x, weight)
    got = matvec(x, weight, bias)
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert got.shape == (1, shape[0]) and got.dtype is dtype
    assert (got.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


def test_more_rows_and_float32_are_left_to_others() -> None:
    weight = torch.zeros(8, 16, dtype=torch.bfloat16)
    assert not is_one_row(torch.zeros(2, 16, dtype=torch.bfloat16), weight)
    assert not is_one_row(torch.zeros(1, 16), weight.float())
