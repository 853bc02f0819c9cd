"""RMS norms, with or without the residual addition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch
from kernels.triton.repeated import Forms, again
from kernels.tuning import pad_power

TILE = 2048  # elements per program, or one row if it has more
ROWS = torch.contiguous_format
FORMS = Forms()


@triton.jit(do_not_specialize=["num_rows", "eps"])
def norm_kernel(  # noqa: PLR0913
    x, residual, weight, out, total, num_rows, eps,
    stride_x, stride_residual, H: tl.constexpr, PAD_H: tl.constexpr, ROWS: tl.constexpr,
    ADD_ONE: tl.constexpr,
):  # fmt: skip
    """One program per ROWS rows: out = RMS norm of x times weight. If residual and total are given,
    total = x + residual is written and normalised instead of x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PAD_H)
    mask = (row < num_rows)[:, None] & (column < H)[None, :]
    row = row.to(tl.int64)[:, None]
    column = column[None, :]
    stored = tl.load(x + row * stride_x + column, mask=mask, other=0.0)
    values = stored.to(tl.float32)
    if residual is not None:
        added = tl.load(residual + row * stride_residual + column, mask=mask, other=0.0)
        # The sum is rounded before it is normalised, like the stored residual stream.
        rounded = (values + added.to(tl.float32)).to(stored.dtype)
        tl.store(total + row * H + column, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / H + eps)
    values = values * scale[:, None]
    factors = tl.load(weight + column, mask=column < H, other=0.0)
    if ADD_ONE:
        values = values * (1.0 + factors.to(tl.float32))
    else:
        values = values.to(stored.dtype).to(tl.float32)
        values = values * factors.to(stored.dtype).to(tl.float32)
    tl.store(out + row * H + column, values.to(stored.dtype), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, add_one: bool = False
) -> torch.Tensor:
    """See kernels.ops.rms_norm."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        again(
            FORMS,
            (rows.shape, rows.stride(), x.dtype, weight.dtype, eps, add_one, x.get_device()),
            (rows, weight, out),
            lambda: [norm_launch((rows, None), weight, (out, None), eps, add_one)],
        )
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    add_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.ops.add_rms_norm."""
    out, total = torch.empty_like(x, memory_format=ROWS), torch.empty_like(x, memory_format=ROWS)
    if out.numel():
        strides, dtypes = (x.stride(), residual.stride()), (x.dtype, residual.dtype, weight.dtype)
        again(
            FORMS,
            (x.shape, strides, dtypes, eps, add_one, x.get_device()),
            (x, residual, weight, out, total),
            lambda: [norm_launch((x, residual), weight, (out, total), eps, add_one)],
        )
    return out, total


@triton.jit(do_not_specialize=["eps"])
def grouped_gated_norm_kernel(  # noqa: PLR0913
    x, gate, weight, out, eps, stride_x, stride_gate, width,
    GROUP: tl.constexpr, PAD: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """One program per row and group of GROUP columns: RMS norm of x * silu(gate), times weight.
    NORM_FIRST: the gate is applied after the norm."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, PAD)
    mask = inner < GROUP
    column = tl.program_id(1) * GROUP + inner
    values = tl.load(x + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    opened = opened / (1.0 + tl.exp(-opened))
    if not NORM_FIRST:
        values *= opened
    if weight is not None:
        values *= tl.rsqrt(tl.sum(values * values, 0) / GROUP + eps)
        values *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if NORM_FIRST:
        values *= opened
    tl.store(out + row * width + column, values.to(out.dtype.element_ty), mask=mask)


def grouped_gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    group: int,
    norm_first: bool = False,
) -> torch.Tensor:
    """See kernels.ops.grouped_gated_norm."""
    out = x.new_empty(x.shape)
    if out.numel():
        grouped_gated_norm_launch((x, gate), weight, out, eps, (group, norm_first)).run()
    return out


def grouped_gated_norm_launch(
    inputs: tuple[torch.Tensor, torch.Tensor],
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    kind: tuple[int, bool],
) -> Launch:
    """The launch of `grouped_gated_norm_kernel`. inputs: x and gate. kind: (columns of a group,
    True to normalise before the gate)."""
    x, gate = inputs
    group, norm_first = kind
    padded = pad_power(group)
    args = {
        "x": x,
        "gate": gate,
        "weight": weight,
        "out": out,
        "eps": eps,
        "stride_x": x.stride(0),
        "stride_gate": gate.stride(0),
        "width": x.shape[1],
        "GROUP": group,
        "PAD": padded,
        "NORM_FIRST": norm_first,
    }
    warps = 4 if padded <= 2048 else 8 if padded <= 8192 else 16
    return Launch(grouped_gated_norm_kernel, (len(x), x.shape[1] // group), args, warps, 1)


def norm_launch(
    inputs: tuple[torch.Tensor, torch.Tensor | None],
    weight: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    eps: float,
    add_one: bool,
) -> Launch:
    """The launch of `norm_kernel`. inputs: x [N, H] and the residual; outputs: the normalised x and
    the sum of x and residual, contiguous."""
    x, residual = inputs
    num_rows, hidden = x.shape
    padded = pad_power(hidden)
    rows = max(1, TILE // padded)
    args = {
        "x": x,
        "residual": residual,
        "weight": weight,
        "out": outputs[0],
        "total": outputs[1],
        "num_rows": num_rows,
        "eps": eps,
        "stride_x": x.stride(0),
        "stride_residual": 0 if residual is None else residual.stride(0),
        "H": hidden,
        "PAD_H": padded,
        "ROWS": rows,
        "ADD_ONE": add_one,
    }
    warps = 4 if padded <= 2048 else 8 if padded <= 8192 else 16
    return Launch(norm_kernel, (triton.cdiv(num_rows, rows),), args, warps, 1)


def configurations() -> Iterator[Launch]:
    """Launches to compile ahead: sizes of heads and hidden states of common models, with and
    without add_one and residual."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden in (128, 1024, 4096, 5120, 16384):
            x = torch.empty((64, hidden), dtype=dtype, device="meta")
            for add_one in (False, True):
                for other in (None, x):
                    yield norm_launch((x, other), x[0], (x, other), 1e-6, add_one)
        rows = torch.empty((64, 6448), dtype=dtype, device="meta")
        for group, norm_first in ((3072, False), (512, True)):
            x, weight = rows[:, :3072].contiguous(), rows[0, :3072]
            yield grouped_gated_norm_launch(
                (x, rows[:, :3072]), weight, x, 1e-6, (group, norm_first)
            )
