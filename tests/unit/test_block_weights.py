"""Packing of quantised matrices in blocks for the CPU: what is stored comes back, and fits."""

import pytest
import torch

from kernels.cpu.matmul.blocks import BlockWriter, can_pack_blocks, pack_blocks, unpack
from kernels.quantized import Quantized
from kernels.reference.blocks import block_product, quantize_units

ALL_BITS = (2, 3, 4, 5, 6, 8)


def matrix(
    shape: tuple[int, int], bits: int, size: int, rng: torch.Generator, **parts: object
) -> Quantized:
    """A random matrix with scales in float16, and further parts of `Quantized`."""
    values = torch.randint(2**bits, shape, generator=rng, dtype=torch.uint8)
    groups = -(-shape[1] // size)
    scales = torch.rand(shape[0], groups, generator=rng).half() / 16 + 1 / 64
    return Quantized(values, scales, bits, size)._replace(**parts)


def dense(given: Quantized) -> torch.Tensor:
    """The weights [N, K] in float32, in plain torch."""
    groups = given.groups
    if groups is None:
        groups = torch.arange(given.values.shape[1]) // given.group_size
    values = given.values.long()
    weight = given.codebook[values].float() if given.codebook is not None else values.float()
    scales = given.scales.float()
    if given.zeros is not None:
        weight = weight - given.zeros.float()[:, groups]
    elif given.offsets is None and given.codebook is None:
        weight = weight - 2 ** (given.bits - 1)
    weight = weight * scales[:, groups]
    return weight if given.offsets is None else weight + given.offsets.float()[:, groups]


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("shape", [(32, 32), (5, 7), (70, 100), (64, 576)])
@pytest.mark.parametrize("size", [16, 32, 64])
def test_a_packed_matrix_comes_back(
    bits: int, shape: tuple[int, int], size: int, rng: torch.Generator
) -> None:
    given = matrix(shape, bits, size, rng)
    back = unpack(pack_blocks(given))
    assert torch.equal(back.values, given.values)
    assert torch.equal(back.scales, given.scales)
    assert back.offsets is back.zeros is back.groups is None


@pytest.mark.parametrize("bits", ALL_BITS)
def test_values_take_no_more_than_their_bits(bits: int, rng: torch.Generator) -> None:
    packed = pack_blocks(matrix((64, 256), bits, 32, rng))
    assert packed.values.nbytes == 64 * 256 * bits // 8
    assert packed.num_bytes == packed.values.nbytes + 64 * 8 * 2


def test_optional_parts_come_back(rng: torch.Generator) -> None:
    super_block = {
        "scales": torch.randint(-32, 64, (40, 32), generator=rng, dtype=torch.int8),
        "offsets": torch.randint(0, 64, (40, 32), generator=rng, dtype=torch.int8),
        "outer_scales": torch.rand(40, 2, generator=rng),
        "outer_offsets": -torch.rand(40, 2, generator=rng),
        "outer_size": 256,
    }
    given = matrix((40, 512), 2, 16, rng, **super_block)
    back = unpack(pack_blocks(given))
    for name in ("values", *super_block):
        found, expected = getattr(back, name), getattr(given, name)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    code = torch.arange(-120, 128, 16, dtype=torch.int16)
    back = unpack(pack_blocks(matrix((40, 64), 4, 32, rng, codebook=code)))
    assert back.codebook is not None and torch.equal(back.codebook, code)


def test_inputs_in_another_order_are_sorted_by_group(rng: torch.Generator) -> None:
    groups = torch.arange(96).remainder(3)
    given = matrix((33, 96), 4, 32, rng, groups=groups)
    packed = pack_blocks(given)
    assert packed.order is not None
    assert groups[packed.order.long()].tolist() == sorted(groups.tolist())
    back = unpack(packed)
    assert torch.equal(back.values, given.values)
    assert back.groups is not None and torch.equal(back.groups, groups)


def test_zero_points_that_differ_become_offsets(rng: torch.Generator) -> None:
    zeros = torch.randint(16, (40, 2), generator=rng, dtype=torch.uint8)
    given = matrix((40, 64), 4, 32, rng, zeros=zeros)
    assert torch.equal(dense(unpack(pack_blocks(given))), dense(given))
    same = pack_blocks(given._replace(zeros=torch.full_like(zeros, 8)))
    assert same.offsets is None and same.zero == 8


def test_pieces_give_the_same_matrix(rng: torch.Generator) -> None:
    given = matrix((100, 96), 5, 32, rng)
    writer = BlockWriter(given, 100)
    for first in (0, 64):
        rows = slice(first, first + 64)
        writer.write(first, given._replace(values=given.values[rows], scales=given.scales[rows]))
    whole = pack_blocks(given)
    assert torch.equal(writer.weight.values, whole.values)
    assert torch.equal(writer.weight.scales, whole.scales)


@pytest.mark.parametrize(
    "parts",
    [
        {"group_size": 24, "scales": torch.ones(8, 4)},
        {"group_size": 0},
        {"scales": torch.ones(8, 5)},
        {"scales": torch.ones(8, 3, dtype=torch.int32)},
        {"values": torch.zeros(8, 96, dtype=torch.float8_e4m3fn)},
        {"bits": 7},
        {"bits": 3, "codebook": torch.arange(8, dtype=torch.int16)},
        {"groups": torch.zeros(96, dtype=torch.int64)},
        {"outer_scales": torch.ones(8, 1), "outer_size": 256},
    ],
)
def test_matrices_that_kernels_cannot_multiply_are_not_packed(
    parts: dict[str, object], rng: torch.Generator
) -> None:
    given = matrix((8, 96), 4, 32, rng)
    assert can_pack_blocks(given)
    assert not can_pack_blocks(given._replace(**parts))


def test_one_group_may_have_any_size(rng: torch.Generator) -> None:
    given = matrix((40, 100), 8, 100, rng)
    assert can_pack_blocks(given)
    back = unpack(pack_blocks(given))
    assert torch.equal(dense(back), dense(given)) and back.group_size == 100


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("size", [16, 32, 96])
def test_the_product_is_that_of_quantised_activations(
    bits: int, size: int, rng: torch.Generator
) -> None:
    offsets = torch.randn(50, -(-100 // size), generator=rng)
    for given in (
        matrix((50, 100), bits, size, rng),
        matrix((50, 100), bits, size, rng, offsets=offsets),
    ):
        x, bias = torch.randn(3, 100, generator=rng), torch.randn(50, generator=rng)
        rows = quantize_units(x)
        near = (rows.integers * rows.scales[..., None]).flatten(1)[:, :100]
        expected = near @ dense(given).T + bias
        close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
        torch.testing.assert_close(block_product(x, pack_blocks(given), bias), expected, **close)


def test_rows_that_are_not_finite_give_results_that_are_not_finite(rng: torch.Generator) -> None:
    packed = pack_blocks(matrix((40, 64), 4, 32, rng))
    x = torch.randn(4, 64, generator=rng)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    x[2] = 0
    result = block_product(x, packed)
    assert not result[:2].isfinite().any() and result[2:].isfinite().all()
    assert not result[2].any()
