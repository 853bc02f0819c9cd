"""A GPU's layers of quantised weights, on the CPU by plain torch: numbers, choices, stacking."""

import pytest
import torch
from support.made_quantized import KINDS, Kind, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from engine.layers import quantized_linear
from engine.layers.quantized import QuantizedWeight, plain, stack
from engine.layers.quantized_linear import Fp8Linear, WeightOnlyLinear, device_linear
from kernels.quantized import Quantized
from kernels.reference.quant import quantize_fp8, quantize_int8, quantize_rows

CPU = torch.device("cpu")
FLOATS = Kind(8, 0, is_float=True)


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


def weight_of(
    kind: Kind, outputs: int = 48, inputs: int = 128, dtype: torch.dtype = torch.float32, **more
) -> QuantizedWeight:
    return QuantizedWeight(matrix=make(kind, outputs, inputs), dtype=dtype, **more)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_agree_with_what_weights_stand_for(kind: Kind, dtype: torch.dtype) -> None:
    weight, bias = weight_of(kind, dtype=dtype), torch.randn(48).to(dtype)
    layer = device_linear(weight, bias, CPU)
    assert isinstance(layer, WeightOnlyLinear)
    assert (layer.out_features, layer.in_features) == (48, 128)
    x = torch.randn(7, 128).to(dtype)
    wide = QuantizedWeight(matrix=weight.matrix, dtype=torch.float32).dequantize()
    wanted = F.linear(x.float(), wide, bias.float())
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(layer(x).float(), wanted, rtol=tolerance, atol=tolerance)
    ids = torch.tensor([47, 0, 47])
    assert torch.equal(layer.rows(ids), weight.dequantize()[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("input_scale", [None, 0.004])
def test_8_bit_floats_do_what_they_say(dtype: torch.dtype, input_scale: float | None) -> None:
    """The arithmetic written out: inputs and weights rounded, products added up in float32."""
    weight = weight_of(FLOATS, dtype=dtype, quantizes_inputs=True, input_scale=input_scale)
    bias = torch.randn(48).to(dtype)
    layer = device_linear(weight, bias, CPU)
    assert isinstance(layer, Fp8Linear)
    x = torch.randn(5, 128).to(dtype)
    rows, scales = quantize_rows(x, None if input_scale is None else torch.tensor([input_scale]))
    numbers = (rows.float() * scales) @ weight.matrix.values.float().T
    wanted = numbers * weight.matrix.scales.float().T + bias.float()
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(layer(x).float(), wanted, rtol=tolerance, atol=tolerance)
    ids = torch.tensor([3, 3, 40])
    assert torch.equal(layer.rows(ids), weight.dequantize()[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_torch_takes_these_products_on_a_gpu(dtype: torch.dtype) -> None:
    """Its own checks of shapes and strides for CUDA, on tensors without memory."""
    gpu = torch.device("cuda:0")
    weight = weight_of(FLOATS, dtype=dtype, quantizes_inputs=True, input_scale=0.5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = Fp8Linear(weight, None, gpu)
        rows = torch.empty(5, 128, dtype=torch.float8_e4m3fn, device=gpu)
        got = layer.product(rows, torch.empty(5, 1, device=gpu), dtype)
    assert (got.shape, got.dtype, got.device) == ((5, 48), dtype, gpu)


def test_a_layer_is_chosen_by_what_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = weight_of(FLOATS, quantizes_inputs=True)
    assert isinstance(device_linear(fp8, None, CPU), Fp8Linear)
    # Products of 8-bit floats want multiples of 16; blocks of scales they do not know.
    crooked = weight_of(FLOATS, outputs=24, quantizes_inputs=True)
    blocks = weight_of(Kind(8, 64, is_float=True), quantizes_inputs=True)
    for weight in (crooked, blocks):
        assert isinstance(device_linear(weight, None, CPU), WeightOnlyLinear)
    assert device_linear(weight_of(Kind(4, 8)), None, CPU) is None
    old = (8, 0)
    monkeypatch.setattr(quantized_linear.torch.cuda, "get_device_capability", lambda device: old)
    assert device_linear(fp8, None, torch.device("cuda")) is None


def test_groups_that_are_no_multiples_once_sorted_are_not_packed() -> None:
    matrix = make(Kind(4, 32, is_sorted=True), 16, 128)
    groups = matrix.groups
    assert groups is not None
    uneven = matrix._replace(groups=groups.clamp(max=2))
    weight = QuantizedWeight(matrix=uneven, dtype=torch.float32)
    assert device_linear(weight, None, CPU) is None
    spread = uneven.scales.float()[:, groups.clamp(max=2)]
    wanted = (uneven.values.float() - 8) * spread
    torch.testing.assert_close(weight.dequantize(), wanted)


def test_the_last_group_may_be_cut_off() -> None:
    """Blocks of 8-bit floats: 100 inputs in blocks of 64."""
    values = torch.randn(8, 100).to(torch.float8_e4m3fn)
    matrix = Quantized(values, torch.rand(8, 2), bits=8, group_size=64)
    weight = QuantizedWeight(matrix=matrix, dtype=torch.float32)
    scales = torch.cat((matrix.scales[:, :1].expand(8, 64), matrix.scales[:, 1:].expand(8, 36)), 1)
    assert torch.equal(weight.dequantize(), values.float() * scales)
    layer, x = device_linear(weight, None, CPU), torch.randn(3, 100)
    assert layer is not None
    torch.testing.assert_close(layer(x), F.linear(x, weight.dequantize()))


def test_parts_that_are_alike_are_stacked() -> None:
    for kind in KINDS:
        if kind.is_sorted:
            continue
        parts = [weight_of(kind, outputs) for outputs in (16, 8, 8)]
        whole = stack(parts)
        assert isinstance(whole, QuantizedWeight) and whole.shape == (32, 128)
        wanted = torch.cat([part.dequantize() for part in parts])
        assert torch.equal(whole.dequantize(), wanted)


def test_zeros_that_some_parts_leave_out_are_filled_in() -> None:
    parts = [weight_of(Kind(4, 32, has_zeros=has)) for has in (True, False)]
    whole = stack(parts)
    assert isinstance(whole, QuantizedWeight)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize(
    "other", [Kind(8, 32), Kind(4, 64), Kind(4, 32, is_sorted=True), FLOATS, None], ids=str
)
def test_parts_that_differ_become_plain_numbers(other: Kind | None) -> None:
    first = weight_of(Kind(4, 32))
    second = torch.randn(8, 128) if other is None else weight_of(other, 8)
    whole = stack([first, second])
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.cat([first.dequantize(), plain(second)]))


def test_the_widest_range_of_inputs_is_kept() -> None:
    scales = (0.25, 0.5, 0.125)
    parts = [weight_of(FLOATS, 16, quantizes_inputs=True, input_scale=s) for s in scales]
    whole = stack(parts)
    assert isinstance(whole, QuantizedWeight)
    assert whole.input_scale == 0.5 and whole.quantizes_inputs


def test_quantising_rounds_to_the_nearest() -> None:
    weight = torch.randn(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    weight[4] = 0
    for make_matrix, most in ((quantize_int8, 0.5 / 127), (quantize_fp8, 2**-4)):
        got = QuantizedWeight(matrix=make_matrix(weight), dtype=torch.float32).dequantize()
        largest = weight.abs().amax(1, keepdim=True)
        assert ((got - weight).abs() <= largest * most * 1.001).all()
        assert torch.equal(got[4], weight[4])
