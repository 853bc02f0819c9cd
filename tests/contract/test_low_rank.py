"""Low-rank products of rows with different adapters: each body, against float64."""

import numpy as np
import pytest
import torch
from support.low_rank_checks import CASES, in_float64, rows_of, table_of

import kernels
from kernels import reference
from kernels.cpu import isa, low_rank
from kernels.cpu.matmul import bfloat16, int8
from kernels.cpu.matmul.block_product import block_product, gated_block_product
from kernels.cpu.matmul.blocks import pack_blocks
from kernels.cpu.matmul.outputs import NO_CHANGE, Change
from kernels.low_rank import AdaptedRows
from kernels.reference.int4 import quantize_int4

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


# Gates and ups in two targets or in one, also of sizes that are no multiple of a panel or vector.
GATED = (
    (96, (128, 128), ((8, 8), (16, 0), (1, 5))),
    (70, (256,), ((4,), (13,), (2,))),
    (64, (40, 88, 64, 64), ((3, 1, 2, 4), (0, 8, 0, 0), (5, 5, 0, 1))),
)
GATED_BODIES = ("bfloat16", "int8", "int4")
SOFT_BODIES = ("bfloat16 soft tiles", "int8 soft tiles")


class Gated:
    """A product with gates, of one of these bodies, and its sums."""

    def __init__(self, kind: str, weight: torch.Tensor) -> None:
        self.kind, self.num_out = kind, len(weight)
        self.body = "soft tiles" if "tiles" in kind else None
        if "int8" in kind:
            self.packed = int8.quantize(weight)
        elif kind == "int4":
            self.packed = pack_blocks(quantize_int4(weight, 32))
        else:
            width = None if self.body is None else bfloat16.width_of(self.body)
            self.packed = bfloat16.pack(weight, width)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        how = {"out_dtype": torch.float32, "body": self.body}
        if "int8" in self.kind:
            return int8.int8_product(x, self.packed, None, **how)
        if self.kind == "int4":
            return block_product(x, self.packed, None, **how)
        return bfloat16.packed_product(x, self.packed, None, self.num_out, **how)

    def __call__(self, x: torch.Tensor, act: str, change: Change = NO_CHANGE) -> torch.Tensor:
        how = {"change": change, "body": self.body}
        if "int8" in self.kind:
            return int8.gated_product(x, self.packed, act, **how)
        if self.kind == "int4":
            return gated_block_product(x, self.packed, act, **how)
        return bfloat16.gated_product(x, self.packed, self.num_out, act, **how)


@pytest.mark.isa
@pytest.mark.parametrize("case", GATED, ids=lambda case: f"{case[0]}-{len(case[1])}")
@pytest.mark.parametrize(
    "kind", [*GATED_BODIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SOFT_BODIES)]
)
def test_products_with_gates_change_before_the_activation(
    case: tuple, kind: str, rng: torch.Generator
) -> None:
    if "int8" in kind and not int8.IS_SUPPORTED:
        pytest.skip(f"{isa.processor()} has no 8-bit dot products")
    if kind == "int4" and case[0] % 32:
        pytest.skip("a group has 32 inputs")
    table, num_out = table_of(case, torch.bfloat16, rng), sum(case[1])
    weight = torch.randn(num_out, case[0], generator=rng).bfloat16() / case[0] ** 0.5
    gated, act = Gated(kind, weight), "silu" if case[0] > 64 else "gelu_tanh"
    for num in (1, 2, 7, 40, 300):
        x = torch.randn(num, case[0], generator=rng).bfloat16()
        slots = torch.randint(-1, 4, (num,), generator=rng)
        rows = rows_of(slots, num_threads=2, num_ranks=16)
        got = gated(x, act, low_rank.change_of(x, table, rows))
        wanted = in_float64(gated.sums(x), x, table, slots)
        wanted = reference.act_mul(wanted, act)
        torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=1e-3)
        has_none = (slots == -1) | (slots == 3)
        assert torch.equal(got[has_none], gated(x, act)[has_none])
        for n in (0, num - 1, num // 2):  # the same bits as alone
            alone = low_rank.change_of(x[n : n + 1], table, rows_of(slots[n : n + 1], num_ranks=16))
            assert torch.equal(gated(x[n : n + 1], act, alone)[0], got[n])


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
