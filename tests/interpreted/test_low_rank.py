"""Triton's low-rank products of rows with different adapters, against float64."""

import pytest
import torch
from support import low_rank_checks, triton_interpreter

import kernels
from kernels.bodies import CPU_TENSORS

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="addresses of tensors on the CPU"
)
FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("case", low_rank_checks.CASES, ids=lambda case: f"{case[0]}")
@pytest.mark.parametrize(("dtype", "wide"), [(FLOAT, FLOAT), (BRAIN, BRAIN)], ids=str)
def test_products_by_row(case, dtype, wide, rng) -> None:
    """Ranks and sizes that fill no tile, rows without an adapter, adapters without rows."""
    nums = (1, 40) if case[0] < 500 else (6,)
    low_rank_checks.check_products(case, dtype, wide, nums, rng)


@pytest.mark.parametrize(("dtype", "wide"), [(BRAIN, FLOAT), (HALF, HALF)], ids=str)
def test_other_types(dtype, wide, rng) -> None:
    low_rank_checks.check_products(low_rank_checks.CASES[2], dtype, wide, (9,), rng)


def test_sums_of_several_parts(rng) -> None:
    low_rank_checks.check_products((1100, (40,), ((3,), (20,), (2,))), FLOAT, FLOAT, (6,), rng)


def test_rows_after_the_last_token_and_steps_without_adapters_are_left(rng) -> None:
    """A recorded step has padding at its end, whatever is in it."""
    case = low_rank_checks.CASES[0]
    there = low_rank_checks.OnDevice(low_rank_checks.table_of(case, FLOAT, rng), 9, "cpu")
    x, y = torch.full((9, 96), torch.nan), torch.randn(9, 256, generator=rng)
    CPU_TENSORS.go_to_triton(True)
    try:
        for slots in (torch.zeros(0, dtype=torch.int64), torch.full((5,), -1)):
            there.rows.fill(slots.numpy())
            got = kernels.add_low_rank(y.clone(), x, there.table, there.rows)
            assert torch.equal(got, y)
    finally:
        CPU_TENSORS.go_to_triton(False)
