"""Products with packed weights: each body returns the bits of the reference in plain torch."""

from typing import Any

import pytest
import torch

from kernels.cpu import isa, pointwise
from kernels.cpu.matmul.block_product import (
    BODIES,
    BODY,
    TILES_BODY,
    block_product,
    gated_block_product,
    largest_output,
    runs_here,
)
from kernels.cpu.matmul.blocks import BlockWeight, pack_blocks
from kernels.cpu.threads import num_threads, set_threads
from kernels.quantized import Quantized
from kernels.reference import blocks as reference

ROWS = (0, 1, 2, 3, 4, 7, 8, 9, 40)
CODEBOOK = torch.tensor([*range(-127, 113, 16), 127], dtype=torch.int16)

# Matrices of each number of bits, with the parts that formats combine: (bits, [N, K], group size,
# names of further parts). Odd sizes leave panels, units and groups incomplete.
MATRICES: tuple[tuple[int, tuple[int, int], int, tuple[str, ...]], ...] = (
    (2, (70, 520), 16, ("outer", "offsets")),
    (3, (33, 528), 16, ("outer",)),
    (3, (64, 96), 32, ("offsets",)),
    (4, (5, 7), 32, ()),
    (4, (70, 100), 32, ("offsets", "bfloat16")),
    (4, (40, 272), 64, ("zeros", "order")),
    (4, (70, 100), 32, ("codebook",)),
    (4, (32, 512), 32, ("codebook", "outer")),
    (5, (70, 576), 32, ("outer", "offsets")),
    (5, (33, 100), 96, ()),
    (6, (40, 512), 16, ("outer",)),
    (6, (70, 100), 32, ("offsets", "float32")),
    (8, (130, 1601), 32, ()),
    (8, (70, 100), 100, ("float32",)),
)
_OUTER = 256


def case(
    bits: int, shape: tuple[int, int], size: int, parts: tuple[str, ...], rng: torch.Generator
) -> BlockWeight:
    """A random packed weight; parts: names as in MATRICES."""
    groups, supers = -(-shape[1] // size), -(-shape[1] // _OUTER)
    dtype = torch.bfloat16 if "bfloat16" in parts else torch.float16

    def numbers(is_inner: bool) -> torch.Tensor:
        if is_inner:
            return torch.randint(-60, 64, (shape[0], groups), generator=rng, dtype=torch.int8)
        scales = torch.randn((shape[0], groups), generator=rng) / 2**bits
        return scales if "float32" in parts else scales.to(dtype)

    has_outer = "outer" in parts
    more: dict[str, Any] = {}
    if "offsets" in parts:
        more["offsets"] = numbers(has_outer)
    if has_outer:
        outer = [torch.randn((shape[0], supers), generator=rng) / 64 for _ in range(2)]
        more["outer_scales"], more["outer_size"] = outer[0], _OUTER
        more["outer_offsets"] = outer[1] if "offsets" in parts else None
    if "zeros" in parts:
        zeros = torch.randint(2**bits, (shape[0], groups), generator=rng)
        more["zeros"] = zeros.byte()
    if "codebook" in parts:
        more["codebook"] = CODEBOOK
    if "order" in parts:
        more["groups"] = torch.arange(shape[1])[torch.randperm(shape[1], generator=rng)] // size
    values = torch.randint(2**bits, shape, generator=rng, dtype=torch.uint8)
    return pack_blocks(Quantized(values, numbers(has_outer), bits, size, **more))


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(
    params=[
        pytest.param(body, marks=[pytest.mark.slow] * (body not in (BODY, TILES_BODY)))
        for body in BODIES
    ]
)
def body(request: pytest.FixtureRequest) -> str:
    if not runs_here(request.param):
        pytest.skip(f"{isa.processor()} does not have the instructions of {request.param}")
    return request.param


@pytest.mark.isa
@pytest.mark.parametrize("given", MATRICES, ids=str)
def test_a_product_has_the_bits_of_the_reference(
    given: tuple[int, tuple[int, int], int, tuple[str, ...]], body: str, rng: torch.Generator
) -> None:
    weight = case(*given, rng)
    bias = torch.randn(weight.num_outputs, generator=rng)
    x = torch.randn(max(ROWS), weight.num_inputs, generator=rng)
    halves = x.bfloat16()
    expected = reference.block_product(x, weight)
    rounded = reference.block_product(halves, weight, bias)
    for rows in ROWS:
        assert torch.equal(block_product(x[:rows], weight, body=body), expected[:rows]), rows
        found = block_product(halves[:rows], weight, bias, body=body)
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, rounded[:rows]), rows
        wide = block_product(halves[:rows], weight, bias, out_dtype=torch.float32, body=body)
        assert torch.equal(wide.bfloat16(), found), rows


@pytest.mark.isa
def test_a_row_does_not_depend_on_other_rows_or_threads(body: str, rng: torch.Generator) -> None:
    weight = case(4, (200, 320), 32, ("offsets",), rng)
    x = torch.randn(310, 320, generator=rng).bfloat16()
    before = num_threads()
    alone = torch.cat([block_product(row, weight, body=body) for row in x.split(1)])
    try:
        for threads in (1, 2, 3):
            set_threads(threads)
            for rows in (2, 9, 33, 310):
                found = block_product(x[-rows:], weight, body=body)
                assert torch.equal(found, alone[-rows:]), (threads, rows)
    finally:
        set_threads(before)


@pytest.mark.isa
def test_rows_that_are_not_finite_give_results_that_are_not_finite(
    body: str, rng: torch.Generator
) -> None:
    for parts in ((), ("offsets",)):
        weight = case(4, (70, 100), 32, parts, rng)
        x = torch.randn(9, 100, generator=rng)
        whole = block_product(x, weight, body=body)
        x[1, 99], x[4, 0], x[8, 40] = torch.nan, torch.inf, -torch.inf
        found = block_product(x, weight, body=body)
        broken = torch.tensor([1, 4, 8])
        assert not found[broken].isfinite().any()
        kept = torch.tensor([0, 2, 3, 5, 6, 7])
        assert torch.equal(found[kept], whole[kept])


@pytest.mark.isa
def test_extreme_inputs_are_quantised_like_the_reference(body: str, rng: torch.Generator) -> None:
    weight = case(4, (70, 100), 32, (), rng)
    x = torch.randn(6, 100, generator=rng)
    for row, factor in enumerate((0.0, 1e-44, 1e-33, 1e-20, 1e30, 3e37)):
        x[row] *= factor
    x[3, 32:64] = torch.arange(-16, 16) * 8 + 0.5  # many are halfway between two integers
    x[3, 40] = 127.0
    found = block_product(x, weight, body=body)
    assert torch.equal(found, reference.block_product(x, weight))


@pytest.mark.isa
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_a_gated_product_is_the_gate_times_the_other_half(
    act: str, body: str, rng: torch.Generator
) -> None:
    weight = case(4, (192, 100), 32, ("offsets",), rng)
    for rows in (1, 3, 21):
        x = torch.randn(rows, 100, generator=rng).bfloat16()
        both = block_product(x, weight, out_dtype=torch.float32, body=body)
        expected = pointwise.act_mul(both, act).bfloat16()
        assert torch.equal(gated_block_product(x, weight, act, body=body), expected), rows


@pytest.mark.isa
def test_the_largest_output_is_found_without_the_others(body: str, rng: torch.Generator) -> None:
    weight = case(6, (1000, 64), 16, (), rng)
    for rows in (1, 2, 30):
        x = torch.randn(rows, 64, generator=rng).bfloat16()
        outputs = block_product(x, weight, out_dtype=torch.float32, body=body)
        assert largest_output(x, weight, body=body).tolist() == outputs.argmax(1).tolist()
    x[4, 3] = torch.nan
    assert largest_output(x, weight, body=body)[4] == -1
