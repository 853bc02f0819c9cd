"""Layers with packed weights that keep activations: the bits of layers with dequantised weights."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from contract.test_cpu_products import OWN, runs_here

from engine.layers.block_linear import BlockLinear
from engine.layers.linear import make_linear
from engine.layers.quantized import QuantizedWeight
from kernels import reference
from kernels.cpu.matmul import bfloat16
from kernels.cpu.matmul.bfloat16 import BODIES
from kernels.cpu.matmul.blocks import pack_blocks
from kernels.cpu.matmul.dequantized import table_of
from kernels.quantized import Quantized
from kernels.reference.quant import dequantize

ROWS = (0, 1, 2, 5, 6, 17, 33, 150)


class Form(NamedTuple):
    """The form of a packed weight."""

    bits: int
    size: int
    parts: str = ""


FORMS = (
    *(Form(bits, 32) for bits in (2, 3, 5)),
    Form(4, 32, "zeros"),
    Form(4, 16, "codebook"),
    Form(4, 32, "outer offsets"),
    Form(6, 16, "outer"),
    Form(8, 64),
    Form(8, 128, "float"),
    Form(8, 2000, "float"),
)


def weight_of(
    form: Form, shape: tuple[int, int], dtype: torch.dtype, rng: torch.Generator
) -> QuantizedWeight:
    """A random weight whose products of values and scales are exact in float32."""
    bits, size, parts = form
    num_out, num_in = shape
    values = torch.randint(2**bits, shape, generator=rng, dtype=torch.uint8)
    groups, supers = -(-num_in // size), -(-num_in // 256)
    scales = torch.rand(num_out, groups, generator=rng).half() / 16 + 1 / 64
    matrix = Quantized(values, scales, bits, size)

    def small(low: int) -> torch.Tensor:
        return torch.randint(low, 32, scales.shape, generator=rng, dtype=torch.int8)

    def outer() -> torch.Tensor:
        return (torch.rand(num_out, supers, generator=rng).half() / 256).float()

    if parts == "zeros":
        zeros = torch.randint(2**bits, scales.shape, generator=rng, dtype=torch.uint8)
        matrix = matrix._replace(zeros=zeros)
    elif parts == "codebook":
        book = torch.randint(-128, 128, (16,), generator=rng, dtype=torch.int16)
        matrix = matrix._replace(codebook=book, scales=scales.bfloat16())
    elif parts.startswith("outer"):
        matrix = matrix._replace(scales=small(-32), outer_scales=outer(), outer_size=256)
        if parts == "outer offsets":
            matrix = matrix._replace(offsets=small(0), outer_offsets=-outer())
    elif parts == "float":  # every number, the smallest among them, but NaN
        values[values & 0x7F == 0x7F] = 0
        matrix = matrix._replace(values=values.view(torch.float8_e4m3fn))
    return QuantizedWeight(matrix=matrix, dtype=dtype)


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 32), (5, 7), (200, 1100)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_layers(
    form: Form, shape: tuple[int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    weight, bias = weight_of(form, shape, dtype, rng), torch.randn(shape[0], generator=rng)
    plain = dequantize(weight.matrix, dtype)
    for has_bias, keeps_float32 in ((False, True), (True, False)):
        added = bias if has_bias else None
        packed = make_linear(weight, added, keeps_float32=keeps_float32, quantize_activations=False)
        assert isinstance(packed, BlockLinear)
        wanted = make_linear(plain.clone(), added, keeps_float32=keeps_float32)
        for num in ROWS:
            x = torch.randn(num, shape[1], generator=rng).to(dtype)
            got = packed(x)
            assert got.dtype is wanted(x).dtype and torch.equal(got, wanted(x)), num
    ids = torch.randint(shape[0], (40,), generator=rng)
    assert torch.equal(packed.rows(ids), plain[ids])


@pytest.mark.isa
@pytest.mark.parametrize(
    "body", [pytest.param(body, marks=[pytest.mark.slow] * (body != OWN)) for body in BODIES]
)
def test_bodies(body: str, rng: torch.Generator) -> None:
    """Each body that this processor can run: outputs, gated outputs and the largest output."""
    if not runs_here(body):
        pytest.skip(f"this processor cannot run {body}")
    weight = weight_of(Form(4, 32, "outer offsets"), (256, 1100), torch.bfloat16, rng)
    packed = pack_blocks(weight.matrix)
    table = table_of(packed)
    plain = bfloat16.pack(weight.dequantize(), bfloat16.width_of(body))
    for num in ROWS[1:]:
        x = torch.randn(num, 1100, generator=rng).bfloat16()
        for product, *more in (
            (bfloat16.packed_product, None, 256),
            (bfloat16.gated_product, 256, "silu"),
            (bfloat16.largest, 256),
        ):
            got, wanted = (product(x, of, *more, body=body) for of in (table, plain))
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_in_activation_order(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Groups of inputs that are not adjacent."""
    weight = weight_of(Form(4, 32, "zeros"), (70, 256), dtype, rng)
    groups = torch.arange(256)[torch.randperm(256, generator=rng)] // 32
    matrix = weight.matrix._replace(groups=groups)
    layer = make_linear(QuantizedWeight(matrix=matrix, dtype=dtype), quantize_activations=False)
    plain = dequantize(matrix, dtype)
    for num in ROWS:
        x = torch.randn(num, 256, generator=rng).to(dtype)
        wanted = x.double() @ plain.double().T
        limit = {"rtol": 2**-8, "atol": 1e-4} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(layer(x), wanted.to(dtype), **limit)
    ids = torch.randint(70, (40,), generator=rng)
    assert torch.equal(layer.rows(ids), plain[ids])


def test_a_row_is_the_same_next_to_any_others(rng: torch.Generator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_linear(weight_of(FORMS[3], (200, 96), dtype, rng))
        x = torch.randn(40, 96, generator=rng).to(dtype)
        together = layer(x)
        for row in range(40):
            assert torch.equal(layer(x[row : row + 1])[0], together[row])


def test_what_cannot_be_packed_is_dequantised(rng: torch.Generator) -> None:
    """Groups of 24 inputs."""
    weight = weight_of(Form(4, 24), (64, 96), torch.float32, rng)
    layer = make_linear(weight)
    assert not isinstance(layer, BlockLinear)
    assert torch.equal(layer.rows(torch.arange(64)), weight.dequantize())


@pytest.mark.parametrize("exact", [False, True])
def test_gates_and_the_largest_output_are_those_of_all_outputs(
    exact: bool, rng: torch.Generator
) -> None:
    weight = weight_of(FORMS[3], (256, 96), torch.bfloat16, rng)
    options = {"quantize_activations": not exact}
    layer, wide = make_linear(weight, **options), make_linear(weight, keeps_float32=True, **options)
    for num in ROWS[1:]:
        x = torch.randn(num, 96, generator=rng).bfloat16()
        assert torch.equal(wide.largest(x).long(), wide(x).argmax(1))
        wanted = reference.act_mul(wide(x), "silu")
        torch.testing.assert_close(layer.gated(x, "silu").float(), wanted, rtol=2**-8, atol=1e-4)
