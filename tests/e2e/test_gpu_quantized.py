"""Quantised weights on a GPU: products against plain torch, directories against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.test_forward import tokens_of
from e2e.test_quantized import written
from support.made_quantized import KINDS, Kind, make

from engine import LLM, SamplingParams
from engine.layers.linear import make_linear
from engine.layers.quantized import QuantizedWeight
from engine.layers.quantized_linear import Fp8Linear, has_fp8
from kernels import quant
from kernels.quantized import pack
from kernels.reference import quant as reference

pytestmark = pytest.mark.gpu

ROWS = (1, 16, 40, 64, 65, 200, 600)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
GPU = torch.device("cuda")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products(kind: Kind, dtype: torch.dtype, seed: int) -> None:
    """Few rows cut the inputs into parts, very many take the dequantised weight."""
    torch.manual_seed(seed)
    if kind.is_float and not has_fp8(GPU):
        pytest.skip("this device has no 8-bit floats")
    matrix = make(kind, num_outputs=1000, num_inputs=2048)
    packed, bias = pack(matrix).to(GPU), torch.randn(1000, device=GPU).to(dtype)
    weight = reference.dequantize(matrix, torch.float64).to(GPU)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 2048, device=GPU).to(dtype)
        wanted = x.double() @ weight.T + bias.double()
        got = quant.weight_only_product(x, packed, bias).double()
        error = (got - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE[dtype], f"{num_rows} rows: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_8_bit_floats(dtype: torch.dtype, input_scale: float | None, seed: int) -> None:
    torch.manual_seed(seed)
    if not has_fp8(GPU):
        pytest.skip("this device has no 8-bit floats")
    matrix = make(Kind(8, 0, is_float=True), num_outputs=256, num_inputs=512)
    weight = QuantizedWeight(
        matrix=matrix, dtype=dtype, quantizes_inputs=True, input_scale=input_scale
    )
    layer = make_linear(weight, device=GPU)
    assert isinstance(layer, Fp8Linear)
    # An H100 adds products of 8-bit floats with 13 bits, so each of the 512 additions is off by at
    # most 2**-13 of a partial sum, to either side. Partial sums are moved to float32 after 128
    # inputs, when they are half as large as an output. Six standard deviations of 512 such errors,
    # and then the rounding of the output, relative to the largest output:
    bound = 6 * (512 / 3) ** 0.5 * 2**-13 / 2 + torch.finfo(dtype).eps / 2
    given = None if input_scale is None else torch.tensor([input_scale])
    for num_rows in ROWS:
        x = torch.randn(num_rows, 512).to(dtype)
        rows, scales = reference.quantize_rows(x, given)
        got = quant.quantize_rows(x.to(GPU), None if given is None else given.to(GPU))
        assert torch.equal(got[1].cpu(), scales)
        assert torch.equal(got[0].cpu().float(), rows.float()), f"{num_rows} rows"
        wanted = (rows.double() * scales) @ reference.dequantize(matrix, torch.float64).T
        error = (layer(x.to(GPU)).cpu().double() - wanted).abs().max() / wanted.abs().max()
        assert error < bound, f"{num_rows} rows: {error:.1e}, at most {bound:.1e}"


@pytest.mark.parametrize(
    "name", ["awq-tied-kept", "awq-experts", "gptq-desc-act", "gptq-head", "fp8-blocks"]
)
def test_directories_give_the_tokens_of_the_cpu(tmp_path: Path, name: str, seed: int) -> None:
    path = str(written(tmp_path, name).path)
    prompts = [{"prompt_token_ids": tokens_of(seed + n, n)} for n in (3, 17, 80)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sizes = {"max_model_len": 128, "num_kv_blocks": 60, "skip_tokenizer_init": True}
    said = []
    for device in ("cpu", "cuda"):
        with LLM(path, device=device, dtype="float32", **sizes) as llm:
            outs = llm.generate(prompts, params)
        said.append([list(out.outputs[0].token_ids) for out in outs])
    assert said[0] == said[1]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_plain_weights_are_quantised_when_loaded(quantization: str, seed: int) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(512, 1024).bfloat16(), torch.randn(9, 1024).bfloat16()
    layer = make_linear(weight, quantization=quantization, device=GPU)
    wanted = x.float() @ weight.float().T
    error = (layer(x.to(GPU)).cpu().float() - wanted).norm() / wanted.norm()
    assert error < (0.02 if quantization == "int8" else 0.06)
