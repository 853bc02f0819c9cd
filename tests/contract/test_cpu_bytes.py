"""8-bit products: every body that this processor can run, and emulated tiles."""

from itertools import product

import pytest
import torch

from kernels import reference
from kernels.cpu import isa
from kernels.cpu.matmul import int8
from kernels.cpu.threads import num_threads, set_threads

# [out, in]: a part of a panel, whole panels, one and a half, more inputs than one pass takes, an
# odd number.
SHAPES = ((5, 7), (64, 32), (96, 64), (200, 130), (70, 1100), (130, 2301))
ROWS = (0, 1, 3, 6, 7, 15, 16, 17, 33, 64, 110, 300)

pytestmark = pytest.mark.skipif(
    not int8.IS_SUPPORTED, reason=f"{isa.processor()} has no 8-bit dot products"
)


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["soft tiles", "tiles"])
def tiles(request: pytest.FixtureRequest) -> str:
    """The body with tiles, whose results are compared with those of the body with dot products."""
    if request.param == "tiles" and not int8.HAS_TILES:
        pytest.skip(f"{isa.processor()} has no tiles of bytes")
    return request.param


def case(shape: tuple[int, int], rng: torch.Generator) -> tuple[int8.Int8Weight, torch.Tensor]:
    return int8.quantize(torch.randn(shape, generator=rng)), torch.randn(shape[0], generator=rng)


def exact(x: torch.Tensor, weight: int8.Int8Weight, num_in: int) -> torch.Tensor:
    """The product in float64 of the integers that the kernel multiplies."""
    scales = x.float().abs().amax(1, keepdim=True) / 127
    inverse = torch.where(scales > 0, 127 / x.float().abs().amax(1, keepdim=True), 0)
    rows = torch.floor(x.float() * inverse + 128.5) - 128
    panels = weight.packed.transpose(1, 2).flatten(0, 1).flatten(1)
    integers = panels[: weight.num_out, :num_in].double()
    return rows.double() @ integers.T * scales.double() * weight.scales[: weight.num_out].double()


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products(
    shape: tuple[int, int], dtype: torch.dtype, tiles: str, rng: torch.Generator
) -> None:
    weight, bias = case(shape, rng)
    for num, added, out in product(ROWS, (None, bias), (torch.float32, torch.bfloat16)):
        x = torch.randn(num, shape[1], generator=rng).to(dtype)
        dots, tiled = (
            int8.int8_product(x, weight, added, out_dtype=out, body=body)
            for body in ("dots", tiles)
        )
        assert dots.dtype is out and torch.equal(dots, tiled)
        wanted = exact(x, weight, shape[1]) + (0 if added is None else added)
        # Inputs halfway between two integers may be rounded to either.
        torch.testing.assert_close(dots.double(), wanted, rtol=2**-8, atol=0.2)


@pytest.mark.isa
@pytest.mark.parametrize("act", int8.ACTS)
@pytest.mark.parametrize(("half", "num_in"), [(64, 70), (128, 1100)])
def test_gates_are_applied_in_the_same_pass(
    half: int, num_in: int, act: str, tiles: str, rng: torch.Generator
) -> None:
    weight, _ = case((2 * half, num_in), rng)
    for num in (0, 1, 7, 16, 33, 110):
        x = torch.randn(num, num_in, generator=rng).bfloat16()
        sums = int8.int8_product(x, weight, None, out_dtype=torch.float32)
        dots, tiled = (int8.gated_product(x, weight, act, body=body) for body in ("dots", tiles))
        assert dots.dtype is torch.bfloat16 and torch.equal(dots, tiled)
        wanted = reference.act_mul(sums.double(), act)
        torch.testing.assert_close(dots.double(), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.isa
@pytest.mark.parametrize("shape", [(5, 7), (64, 32), (700, 96), (1000, 130)])
def test_the_largest_is_found_without_storing_the_outputs(
    shape: tuple[int, int], tiles: str, rng: torch.Generator
) -> None:
    matrix = torch.randn(shape, generator=rng)
    matrix[shape[0] // 2] = matrix[1]  # equal outputs: the first one counts
    weight = int8.quantize(matrix)
    for num in (1, 2, 7, 40, 110):
        x = torch.randn(num, shape[1], generator=rng).bfloat16()
        sums = int8.int8_product(x, weight, None, out_dtype=torch.float32)
        first = (sums == sums.amax(1, keepdim=True)).int().argmax(1)
        for body in ("dots", tiles):
            found = int8.largest(x, weight, body=body)
            assert found.dtype is torch.int32 and torch.equal(found.long(), first)


def test_rows_that_are_not_finite_have_no_largest_output(tiles: str, rng: torch.Generator) -> None:
    weight, _ = case((300, 32), rng)
    x = torch.randn(4, 32, generator=rng)
    x[1, 0], x[2, 5] = torch.inf, torch.nan
    for body in ("dots", tiles):
        assert [found < 0 for found in int8.largest(x, weight, body=body).tolist()] == [
            False,
            True,
            True,
            False,
        ]


def test_a_row_that_is_not_finite_harms_no_other_row(tiles: str, rng: torch.Generator) -> None:
    weight, bias = case((70, 40), rng)
    x = torch.randn(20, 40, generator=rng).bfloat16()
    sound = int8.int8_product(x, weight, bias, body=tiles)
    x[3, 5] = float("nan")
    got = int8.int8_product(x, weight, bias, body=tiles)
    kept = torch.arange(20) != 3
    assert not got[3].isfinite().any() and torch.equal(got[kept], sound[kept])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_number_of_rows(
    threads: int, tiles: str, rng: torch.Generator
) -> None:
    before = num_threads()
    set_threads(threads)
    try:
        weight, bias = case((200, 96), rng)
        x = torch.randn(40, 96, generator=rng).bfloat16()
        together = int8.int8_product(x, weight, bias, body=tiles)
        for row in range(40):
            alone = int8.int8_product(x[row : row + 1], weight, bias)
            assert torch.equal(alone[0], together[row])
    finally:
        set_threads(before)
