"""Low-rank adapters of rows against a plain loop."""

import pytest
import torch

from kernels.reference import grouped as reference
from kernels.triton import lora

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.parametrize(
    ("dtype", "num_rows", "hidden", "rank"),
    [
        (torch.float32, 1, 96, 16),
        (torch.float32, 37, 1100, 8),
        (torch.bfloat16, 20, 600, 16),
        (torch.float16, 5, 64, 24),
        (torch.bfloat16, 520, 64, 16),
    ],
)
def test_adapters(dtype: torch.dtype, num_rows: int, hidden: int, rank: int) -> None:
    """Ranks and sizes that fill no tile, rows without an adapter, an adapter without rows."""
    num_adapters, width = 4, 90
    a = (torch.randn(num_adapters, rank, hidden) * hidden**-0.5).to(dtype)
    b = (torch.randn(num_adapters, width, rank) * rank**-0.5).to(dtype)
    a[2], b[2] = torch.nan, torch.nan
    adapters = torch.tensor([3, -1, 0, 1, 3])[torch.arange(num_rows) % 5].int()
    x, y = torch.randn(num_rows, hidden).to(dtype), torch.randn(num_rows, width).to(dtype)
    before = y.clone()
    wanted = y.double()
    reference.add_lora(wanted, x.double(), a.double(), b.double(), adapters)
    lora.add_lora(y, x, a, b, adapters)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(y[adapters < 0], before[adapters < 0])


def test_rows_without_adapters_are_not_touched_or_read() -> None:
    x, y = torch.full((3, 32), torch.nan), torch.full((3, 32), torch.nan)
    x[1], y[1] = 1, 0
    a, b = torch.ones(1, 16, 32), torch.ones(1, 32, 16)
    lora.add_lora(y, x, a, b, torch.tensor([-1, 0, -1], dtype=torch.int32))
    assert torch.equal(y[1], torch.full((32,), 512.0)) and y[[0, 2]].isnan().all()


def test_views_into_fused_projections_and_company() -> None:
    """A part of a wider output; each row as it is alone."""
    x, wide = torch.randn(6, 64), torch.randn(6, 100)
    a, b = torch.randn(2, 8, 64), torch.randn(2, 40, 8)
    adapters = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.int32)
    kept = wide.clone()
    groups = lora.group_rows(adapters, 2, 4)
    lora.add_grouped(wide[:, 30:70], x, a, b, groups)
    assert torch.equal(wide[:, :30], kept[:, :30]) and torch.equal(wide[:, 70:], kept[:, 70:])
    alone = kept[4:5, 30:70].contiguous()
    lora.add_lora(alone, x[4:5], a, b, adapters[4:5])
    assert torch.equal(alone, wide[4:5, 30:70])
