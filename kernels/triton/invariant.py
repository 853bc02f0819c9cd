"""Batch-invariant products: the order of a row's sums does not depend on the other rows.

Libraries choose tiles, instructions and splits by the number of rows. Here a program reads all
inputs in ascending order, nothing is split, and every tile uses the same instruction
(`kernels.product_tuning`). The idea is from Horace He and Thinking Machines Lab, "Defeating
Nondeterminism in LLM Inference", 2025.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.product_tuning import invariant_tile
from kernels.triton.launch import Launch, arch_of
from kernels.triton.repeated import Forms, again

BAND = tl.constexpr(8)  # tiles of rows that share the weights in the cache
FORMS = Forms()


@triton.jit(do_not_specialize=["num_rows"])
def invariant_kernel(  # noqa: PLR0913
    x, weight, bias, out, num_rows, num_outputs, num_inputs, stride_x, stride_weight,
    T: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, tile of outputs), ordered by bands of several tiles of rows,
    which share cached weights. weight: [outputs, inputs]."""
    row_tiles = tl.cdiv(num_rows, T.rows)
    in_band = BAND * tl.cdiv(num_outputs, T.outputs)
    first = tl.program_id(0) // in_band * BAND
    height = tl.minimum(row_tiles - first, BAND)
    place = tl.program_id(0) % in_band
    row = (first + place % height) * T.rows + tl.arange(0, T.rows)
    output = place // height * T.outputs + tl.arange(0, T.outputs)
    is_row = row < num_rows
    is_output = output < num_outputs
    # Rows and outputs after the last read row or output 0; their results are not written.
    held_row = tl.where(is_row, row, 0).to(tl.int64)
    held_output = tl.where(is_output, output, 0).to(tl.int64)
    at = tl.arange(0, T.inputs)
    rows = x + held_row[:, None] * stride_x + at[None, :]
    columns = weight + held_output[:, None] * stride_weight + at[None, :]
    sums = tl.full([T.rows, T.outputs], 0.0, tl.float32)
    for start in range(0, num_inputs, T.inputs):
        is_input = (at < num_inputs - start)[None, :]
        a = tl.load(rows + start, mask=is_input, other=0.0)
        b = tl.load(columns + start, mask=is_input, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    there = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    mask = is_row[:, None] & is_output[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), mask=mask)


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Batch-invariant x @ weight.T + bias; see kernels.ops.invariant_linear."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty((*x.shape[:-1], len(weight)))
    if out.numel():
        forms = (rows.shape, rows.stride(), weight.shape, weight.stride())
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        again(
            FORMS,
            (*forms, dtypes, x.get_device()),
            (rows, weight, bias, out),
            lambda: [invariant_launch(rows, weight, bias, out)],
        )
    return out


def invariant_launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    """Returns the launch of `invariant_kernel`. x [N, inputs], weight [outputs, inputs], out
    contiguous. Raises ``ValueError`` for other layouts."""
    if x.dtype is not weight.dtype or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("batch-invariant products need contiguous rows and weights of one dtype")
    num_outputs, num_inputs = weight.shape
    tile = invariant_tile(arch_of(x), len(x), (num_outputs, num_inputs), x.element_size())
    args = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "out": out,
        "num_rows": len(x),
        "num_outputs": num_outputs,
        "num_inputs": num_inputs,
        "stride_x": x.stride(0),
        "stride_weight": weight.stride(0),
        "T": tile,
    }
    grid = (triton.cdiv(len(x), tile.rows) * triton.cdiv(num_outputs, tile.outputs),)
    return Launch(invariant_kernel, grid, args, tile.warps, tile.stages)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: every tile, for matrices of Llama 8B and of odd sizes, for one row
    and for many."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_outputs, num_inputs in ((4096, 14336), (28672, 4096), (1000, 1100)):
            weight = torch.empty((num_outputs, num_inputs), dtype=dtype, device="meta")
            for num_rows in (1, 4096):
                x = weight.new_empty((num_rows, num_inputs))
                out = weight.new_empty((num_rows, num_outputs))
                bias = None if num_rows > 1 else weight[:, 0]
                yield invariant_launch(x, weight, bias, out)
