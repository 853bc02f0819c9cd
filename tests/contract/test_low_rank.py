"""Low-rank products of rows with different adapters: each body, against float64."""

import numpy as np
import pytest
import torch

import kernels
from kernels import reference
from kernels.cpu import isa, low_rank
from kernels.low_rank import AdaptedRows, LowRankProduct, ProductTable, in_panels

# Inputs, outputs of each product, ranks of each adapter's products.
CASES = (
    (96, (128, 64, 64), ((8, 8, 8), (16, 3, 0), (1, 64, 5))),
    (70, (200,), ((4,), (13,), (2,))),
    (33, (7, 70), ((1, 2), (5, 0), (0, 9))),
    (576, (1100,), ((8,), (32,), (16,))),
)
ROWS = (1, 2, 3, 5, 8, 40, 130)
NEEDS = {"dots": "avx512_bf16"}


def bodies() -> list[pytest.param]:
    own = ("floats", low_rank.BODY)
    return [
        pytest.param(*one, marks=[pytest.mark.slow] * (one[0] not in own))
        for one in low_rank.BODIES
    ]


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_runs(body: str) -> None:
    if isa.LEVELS.index(NEEDS.get(body, "base")) > isa.LEVELS.index(isa.LEVEL):
        pytest.skip(f"{isa.processor()} computes without {NEEDS[body]}")


def table_of(case: tuple, dtype: torch.dtype, rng: torch.Generator) -> ProductTable:
    """Products of adapters in slots 0 to 2; those of the last one also scale and add."""
    num_in, widths, adapters = case
    table = ProductTable(len(adapters) + 1)
    for slot, ranks in enumerate(adapters):
        products, first = [], 0
        for rank, width in zip(ranks, widths, strict=True):
            if rank:
                a = torch.randn(rank, num_in, generator=rng) / num_in**0.5
                b = in_panels(torch.randn(width, rank, generator=rng).to(dtype))
                product = LowRankProduct(first, width, a.to(dtype), b, 1.5)
                if slot == 2:
                    ends = torch.randn(2, width, generator=rng)
                    product = product._replace(factors=ends[0], added=ends[1])
                products.append(product)
            first += width
        table.put(slot, products)
    return table


def rows_of(slots: torch.Tensor, num_threads: int = 1) -> AdaptedRows:
    rows = AdaptedRows(len(slots))
    rows.fill(slots.numpy(), num_threads)
    return rows


def in_float64(
    y: torch.Tensor, x: torch.Tensor, table: ProductTable, slots: torch.Tensor
) -> torch.Tensor:
    exact = ProductTable(len(table.entries))
    for slot in range(len(table.entries)):
        exact.put(
            slot,
            [
                one._replace(
                    a=one.a.double(), panels=one.panels.double()
                )
                for one in table.of(slot)
            ],
        )
    return reference.add_low_rank(y.double(), x.double(), exact, rows_of(slots))


@pytest.mark.isa
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{sum(case[1])}")
@pytest.mark.parametrize(("body", "cell"), bodies())
def test_products_by_row(case: tuple, body: str, cell: int, rng: torch.Generator) -> None:
    check_runs(body)
    dtype = torch.float32 if body == "floats" else torch.bfloat16
    wide = torch.float32 if cell == 4 else torch.bfloat16
    table, num_out = table_of(case, dtype, rng), sum(case[1])
    for num in ROWS:
        x = torch.randn(num, case[0], generator=rng).to(dtype)
        y = torch.randn(num, num_out, generator=rng).to(wide)
        slots = torch.randint(-1, 4, (num,), generator=rng)
        rows = rows_of(slots, num_threads=2)
        got = low_rank.add_low_rank(y.clone(), x, table, rows, body=body)
        assert torch.equal(got[slots == -1], y[slots == -1])
        assert torch.equal(got[slots == 3], y[slots == 3])  # an adapter without such products
        error = 1e-5 if cell == 4 else 2**-6
        wanted = in_float64(y, x, table, slots)
        torch.testing.assert_close(got.double(), wanted, rtol=error, atol=4 * error)
        for n in (0, num - 1, num // 2):  # the same bits as alone
            alone = rows_of(slots[n : n + 1])
            one = low_rank.add_low_rank(y[n : n + 1].clone(), x[n : n + 1], table, alone, body=body)
            assert torch.equal(one[0], got[n])


@pytest.mark.isa
def test_emulated_dots_have_the_same_bits(rng: torch.Generator) -> None:
    check_runs("dots")
    case = CASES[0]
    table = table_of(case, torch.bfloat16, rng)
    x = torch.randn(9, case[0], generator=rng).bfloat16()
    rows = rows_of(torch.randint(-1, 3, (9,), generator=rng))
    y = torch.zeros(9, sum(case[1]))
    both = [
        low_rank.add_low_rank(y.clone(), x, table, rows, body=body)
        for body in ("dots", "soft dots")
    ]
    assert torch.equal(*both)


def test_rows_without_an_adapter_are_left(rng: torch.Generator) -> None:
    table = table_of(CASES[0], torch.float32, rng)
    rows = AdaptedRows(8)
    rows.fill(np.full(8, -1))
    y = torch.randn(8, 256, generator=rng)
    assert rows.num_blocks == 0
    assert torch.equal(kernels.add_low_rank(y.clone(), torch.ones(8, 96), table, rows), y)


def test_dtypes_without_a_body_take_the_reference(rng: torch.Generator) -> None:
    table = table_of(CASES[0], torch.float16, rng)
    rows = rows_of(torch.arange(3))
    x, y = (torch.randn(3, width, generator=rng).half() for width in (96, 256))
    got = kernels.add_low_rank(y.clone(), x, table, rows)
    wanted = in_float64(y, x, table, torch.arange(3))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)
