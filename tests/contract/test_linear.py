"""Linear layers: right for every shape, one copy of the weights, damage kept to its row."""

import pytest
import torch
from torch.nn import functional as F

from engine.errors import ConfigError
from engine.layers import linear
from engine.layers.linear import make_linear
from kernels.cpu.threads import num_threads, set_threads

# [out, in]: whole panels, a part of one, several, more inputs than one pass takes.
SHAPES = ((64, 32), (5, 7), (130, 96), (200, 4100))
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 13, 64)


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = num_threads()
    set_threads(request.param)
    yield request.param
    set_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_float32(shape: tuple[int, int], has_bias: bool, rng: torch.Generator) -> None:
    weight = torch.randn(shape, generator=rng)
    bias = torch.randn(shape[0], generator=rng) if has_bias else None
    layer = make_linear(weight, bias)
    assert (layer.out_features, layer.in_features) == shape
    for num in ROWS:
        x = torch.randn(num, shape[1], generator=rng)
        wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        scale = shape[1] ** 0.5
        torch.testing.assert_close(layer(x).double() / scale, wanted / scale, rtol=0, atol=2e-5)


def int8_layers(weight: torch.Tensor, bias: torch.Tensor | None):
    yield make_linear(weight, bias, quantization="int8")
    yield linear.TorchInt8Linear(weight, bias)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_near(shape: tuple[int, int], rng: torch.Generator) -> None:
    weight = torch.randn(shape, generator=rng) * torch.rand(shape[0], 1, generator=rng)
    bias = torch.randn(shape[0], generator=rng)
    for layer in int8_layers(weight, bias):
        for num in (1, 4, 17, 64):
            x = torch.randn(num, shape[1], generator=rng)
            wanted = F.linear(x, weight)
            error = (layer(x) - bias - wanted).norm() / wanted.norm()
            assert error < 0.02, f"{num} rows: {error:.4f}"


def test_scores_of_8_bit_weights_are_not_rounded_to_bfloat16(rng: torch.Generator) -> None:
    """Among many outputs, rounded ones would often be equal."""
    weight = torch.randn(300, 64, generator=rng).bfloat16()
    x = torch.randn(3, 64, generator=rng).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        layer = make_linear(weight, quantization="int8", keeps_float32=dtype is torch.float32)
        assert layer(x).dtype is dtype


def test_rows_of_any_width_have_no_gaps(rng: torch.Generator) -> None:
    """What is read row by row, and all at once, goes through the same body."""
    for width in (48, 80, 96):
        layer = make_linear(torch.randn(70, width, generator=rng).bfloat16())
        assert layer.rows(torch.tensor([3, 1, 2])).is_contiguous()


def test_int8_does_what_it_says(rng: torch.Generator) -> None:
    """Both bodies against the arithmetic written out: they differ by rounding of floats alone."""
    weight, x = torch.randn(70, 50, generator=rng), torch.randn(9, 50, generator=rng)
    scales, row_scales = (t.abs().amax(1, keepdim=True) / 127 for t in (weight, x))
    integers = (x / row_scales).round() @ (weight / scales).round().T
    for layer in int8_layers(weight, None):
        got = layer(x) / (row_scales * scales.T)
        # A product that lies on a half may round either way.
        assert (got - integers).abs().max() < 128


def test_int8_of_zeros_and_of_a_zero_row() -> None:
    for layer in int8_layers(torch.zeros(3, 8), None):
        assert torch.equal(layer(torch.ones(2, 8)), torch.zeros(2, 3))
    for layer in int8_layers(torch.ones(3, 8), None):
        assert torch.equal(layer(torch.zeros(2, 8)), torch.zeros(2, 3))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damage_stays_in_its_row(
    quantization: str | None, bad: float, rng: torch.Generator
) -> None:
    layer = make_linear(torch.randn(70, 32, generator=rng), quantization=quantization)
    x = torch.randn(8, 32, generator=rng)
    sound = layer(x)
    x[3, 5] = bad
    got = layer(x)
    assert not got[3].isfinite().any()
    kept = torch.arange(8) != 3
    assert torch.equal(got[kept], sound[kept])


def test_a_row_does_not_depend_on_its_neighbours(rng: torch.Generator) -> None:
    layer = make_linear(torch.randn(130, 96, generator=rng))
    x = torch.randn(13, 96, generator=rng)
    together = layer(x)
    for row in range(13):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


def test_rows_are_the_weights(rng: torch.Generator) -> None:
    weight = torch.randn(130, 48, generator=rng)
    ids = torch.tensor([0, 129, 64, 63, 64])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(make_linear(weight.to(dtype)).rows(ids), weight.to(dtype)[ids])
    for layer in int8_layers(weight, None):
        assert (layer.rows(ids) - weight[ids]).abs().max() <= weight.abs().max() / 127


def test_strided_rows_are_taken(rng: torch.Generator) -> None:
    weight, x = torch.randn(9, 16, generator=rng), torch.randn(4, 32, generator=rng)
    for quantization in (None, "int8"):
        layer = make_linear(weight, quantization=quantization)
        assert torch.equal(layer(x[:, ::2]), layer(x[:, ::2].contiguous()))


def test_a_quantization_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'int3'.*int8"):
        make_linear(torch.zeros(2, 2), quantization="int3")
    with pytest.raises(ConfigError, match=r"'fp8'.*'cuda'.*'cpu'.*quantization='int8'"):
        make_linear(torch.zeros(2, 2), quantization="fp8")
