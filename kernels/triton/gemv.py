"""One row times a weight matrix, the main operation of a single request's decode step.

Reading the weights takes most of the time. To use the memory bandwidth, every thread issues eight
loads of 16 bytes before the first add, and each program has few outputs, so there are many
programs. cuBLAS takes 1.05 to 1.7 times as long."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch

INPUTS = 1024  # inputs per step
MANY_WEIGHTS = 1 << 24  # larger matrices have enough programs with more outputs each


@triton.jit
def gemv_kernel(  # noqa: PLR0913
    x, weight, bias, out, num_outputs, num_inputs, stride, OUTPUTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program per block of OUTPUTS outputs; weight [num_outputs, num_inputs]."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    rows = weight + output.to(tl.int64)[:, None] * stride
    sums = tl.zeros([OUTPUTS, TILE], tl.float32)
    for start in range(0, num_inputs, TILE):
        at = start + tl.arange(0, TILE)
        is_input = at < num_inputs
        factors = tl.load(x + at, mask=is_input, other=0.0).to(tl.float32)
        mask = is_output[:, None] & is_input[None, :]
        # Weights are read once per step, so caching them does not help.
        tile = tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        sums += tile.to(tl.float32) * factors[None, :]
    product = tl.sum(sums, 1)
    if bias is not None:
        product += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, product.to(out.dtype.element_ty), mask=is_output)


def matvec(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias for a single row: x [.., K], weight [N, K], bias [N] -> [.., N], summed
    in float32."""
    out = x.new_empty((*x.shape[:-1], len(weight)))
    gemv_launch(x, weight, bias, out).run()
    return out


def gemv_launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    num_outputs, num_inputs = weight.shape
    is_long = num_inputs > 8 * INPUTS  # with few steps, more outputs per program are better
    outputs = 8 if weight.numel() >= MANY_WEIGHTS and not is_long else 4
    args = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "out": out,
        "num_outputs": num_outputs,
        "num_inputs": num_inputs,
        "stride": weight.stride(0),
        "OUTPUTS": outputs,
        "TILE": INPUTS,
    }
    return Launch(gemv_kernel, (triton.cdiv(num_outputs, outputs),), args, 4, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: matrices of Qwen3 0.6B and Llama 8B, with and without bias."""
    for dtype in (torch.bfloat16, torch.float16):
        for num_outputs, num_inputs in ((1024, 3072), (6144, 4096), (4096, 14336)):
            weight = torch.empty((num_outputs, num_inputs), dtype=dtype, device="meta")
            for bias in (None, weight[:, 0]):
                yield gemv_launch(weight[:1], weight, bias, weight[:1])
