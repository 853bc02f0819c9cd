"""Attention of encoders of pictures on CPUs equals attention in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.mm.attention import attend

SHAPES = ((1, 12, 577, 64), (3, 4, 1024, 64), (2, 16, 100, 72), (5, 2, 64, 80), (2, 2, 70, 20))


class Both(nn.Module):
    """A module whose tokens attend both ways."""

    is_causal = False


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_tokens_attend_to_each_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    found, weights = attend(Both(), q, k, v, None, scaling=0.1)
    wanted = nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), scale=0.1
    )
    assert weights is None and found.dtype == dtype
    error = (found - wanted.transpose(1, 2)).abs().max()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_mask_is_obeyed() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 128, 64).bfloat16() for _ in range(3))
    mask = torch.rand(2, 1, 128, 128) < 0.5
    mask[..., 0] = True
    found, _ = attend(Both(), q, k, v, mask)
    wanted = nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask
    )
    assert (found - wanted.transpose(1, 2)).abs().max() < 1e-2


def test_a_sequence_does_not_depend_on_the_others() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(3, 4, 200, 64).bfloat16() for _ in range(3))
    together, _ = attend(Both(), q, k, v, None)
    alone, _ = attend(Both(), q[1:2], k[1:2], v[1:2], None)
    assert torch.equal(together[1:2], alone)
