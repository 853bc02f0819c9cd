"""Layer norms, with or without the residual addition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch
from kernels.triton.repeated import Forms, again
from kernels.tuning import pad_power

TILE = 2048  # elements per program, or one row if it has more
FORMS = Forms()
Inputs = tuple[torch.Tensor, torch.Tensor | None]


@triton.jit(do_not_specialize=["num_rows", "eps"])
def layer_norm_kernel(  # noqa: PLR0913
    x, residual, weight, bias, out, total, num_rows, eps,
    H: tl.constexpr, PAD_H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program per ROWS rows: out = layer norm of x, or of x + residual. If total is given, the
    sum is rounded, written to it, and then normalised."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PAD_H)
    mask = (row < num_rows)[:, None] & (column < H)[None, :]
    place = row.to(tl.int64)[:, None] * H + column[None, :]
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        if total is not None:
            rounded = values.to(out.dtype.element_ty)
            tl.store(total + place, rounded, mask=mask)
            values = rounded.to(tl.float32)
    mean = tl.sum(values, 1) / H
    values = tl.where(mask, values - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / H + eps)
    factors = tl.load(weight + column, mask=column < H, other=0.0)
    values = values * scale[:, None] * factors.to(tl.float32)[None, :]
    if bias is not None:
        values += tl.load(bias + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=mask)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See kernels.ops.layer_norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run((x, residual), (weight, bias), (out, None), eps)
    return out


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.ops.add_layer_norm."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _run((x, residual), (weight, bias), (out, total), eps)
    return out, total


def _run(inputs: Inputs, factors: Inputs, outputs: Inputs, eps: float) -> None:
    """Launch the kernel, if there are any rows. factors: weight and bias; outputs: as in
    `layer_norm_launch`."""
    x, residual = inputs
    rows = (x.contiguous(), None if residual is None else residual.contiguous())
    if not x.numel():
        return
    tensors = *rows, *factors, *outputs
    forms = tuple(None if one is None else (one.shape, one.dtype) for one in tensors)
    again(
        FORMS,
        (forms, eps, x.get_device()),
        tensors,
        lambda: [layer_norm_launch(rows, factors, outputs, eps)],
    )


def layer_norm_launch(inputs: Inputs, factors: Inputs, outputs: Inputs, eps: float) -> Launch:
    """The launch of `layer_norm_kernel`. inputs: x [N, H] and the residual; factors: weight and
    bias; outputs: the normalised rows, and the sum of x and the residual if it is wanted; all
    contiguous."""
    x, residual = inputs
    num_rows, hidden = x.shape
    padded = pad_power(hidden)
    rows = max(1, TILE // padded)
    args = {
        "x": x,
        "residual": residual,
        "weight": factors[0],
        "bias": factors[1],
        "out": outputs[0],
        "total": outputs[1],
        "num_rows": num_rows,
        "eps": eps,
        "H": hidden,
        "PAD_H": padded,
        "ROWS": rows,
    }
    warps = 4 if padded <= 2048 else 8 if padded <= 8192 else 16
    return Launch(layer_norm_kernel, (triton.cdiv(num_rows, rows),), args, warps, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead, for hidden sizes of common encoders."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden in (384, 768, 1024):
            x = torch.empty((64, hidden), dtype=dtype, device="meta")
            weight = torch.empty(hidden, device="meta")
            for inputs, outputs in (((x, None), (x, None)), ((x, x), (x, None)), ((x, x), (x, x))):
                for bias in (weight, None):
                    yield layer_norm_launch(inputs, (weight, bias), outputs, 1e-12)
