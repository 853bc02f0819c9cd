"""Vectors of tokens in a table of which each rank has some rows."""

from __future__ import annotations

import pytest
import torch

import kernels


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 5, 200])
def test_rows_of_a_part(dtype: torch.dtype, count: int, seed: int) -> None:
    torch.manual_seed(seed)
    mine = range(30, 47)
    ids = torch.randint(0, 60, (count,), dtype=dtype)
    rows = kernels.own_rows(ids, mine)
    wanted = [int(i) - 30 if int(i) in mine else 0 for i in ids]
    assert rows.dtype is dtype and rows.tolist() == wanted
    for cell in (torch.float32, torch.bfloat16):
        x = torch.randn(count, 7).to(cell)
        kept = torch.stack([v if int(i) in mine else v * 0 for i, v in zip(ids, x, strict=True)])
        assert kernels.clear_others(x, ids, mine) is x
        assert torch.equal(x, kept)
        wide = torch.randn(count, 14).to(cell)
        apart = kernels.clear_others(wide[:, ::2], ids, mine)  # rows that are not contiguous
        assert all(v.any() == (int(i) in mine) for i, v in zip(ids, apart, strict=True))


def test_other_tokens_may_have_any_vector() -> None:
    x = torch.full((2, 3), torch.nan)
    kernels.clear_others(x, torch.tensor([4, 5]), range(4, 5))
    assert x[1].tolist() == [0.0, 0.0, 0.0] and x[0].isnan().all()
