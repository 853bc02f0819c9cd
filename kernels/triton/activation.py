"""Activations and gates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.triton.launch import Launch
from kernels.triton.repeated import Forms, again

TILE = 1024
FORMS = Forms()
ACTS = ("silu", "gelu_tanh", "gelu")
SINGLE_ACTS = (*ACTS, "relu")  # without a gate


@triton.jit
def softplus(x):
    """Returns log(1 + e ** x)."""
    u = tl.exp(-tl.abs(x))
    # A series of log(1 + u) = 2 * atanh(u / (2 + u)), exact for small u.
    s = u / (2.0 + u)
    square = s * s
    series = 2.0 / 15.0
    for n in tl.static_range(7):
        series = series * square + 2.0 / (13 - 2 * n)
    return tl.maximum(x, 0.0) + series * s


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """Returns ACT(gate) of float32 values; ACT: "silu", "gelu_tanh", "gelu" or "relu", a
    literal."""
    if ACT == "silu":
        result = gate / (1.0 + tl.exp(-gate))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # A form of tanh that saturates instead of overflowing.
        result = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    elif ACT == "relu":
        result = tl.where(gate < 0.0, 0.0, gate)  # NaN stays
    else:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return result


@triton.jit
def act_mul_kernel(
    gate_up, out, stride, F: tl.constexpr, TILE: tl.constexpr, ACT: tl.constexpr
):  # fmt: skip
    """One program per (row, block of TILE columns): out = ACT(gate) * up. ACT(gate) is rounded to
    the dtype of gate_up before the multiplication."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < F
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * stride + F + column, mask=mask, other=0.0)
    active = activated(gate.to(tl.float32), ACT).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * F + column, product.to(gate.dtype), mask=mask)


def act_mul(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """See kernels.ops.act_mul."""
    if act not in ACTS:
        raise ValueError(f"activation {act!r} is unknown; use one of {', '.join(map(repr, ACTS))}")
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    if out.numel():
        again(
            FORMS,
            (rows.shape, rows.stride(), rows.dtype, act, rows.get_device()),
            (rows, out),
            lambda: [act_mul_launch(rows, out, act)],
        )
    return out


def act_mul_launch(gate_up: torch.Tensor, out: torch.Tensor, act: str) -> Launch:
    """The launch of `act_mul_kernel`. gate_up: [N, 2F]; out: [N, F], contiguous."""
    num_rows, width = gate_up.shape
    args = {
        "gate_up": gate_up,
        "out": out,
        "stride": gate_up.stride(0),
        "F": width // 2,
        "TILE": TILE,
        "ACT": act,
    }
    return Launch(act_mul_kernel, (num_rows, triton.cdiv(width // 2, TILE)), args, 4, 1)


@triton.jit
def gate_kernel(  # noqa: PLR0913
    x, gate, out, width, stride_x, stride_gate, IS_WIDE: tl.constexpr, ACT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program per (row, block of TILE columns): out = x * ACT(gate). IS_WIDE: a row of the gate
    has as many columns as x, otherwise one."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    values = tl.load(x + row * stride_x + column, mask=mask, other=0.0)
    if IS_WIDE:
        gates = tl.load(gate + row * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    else:
        gates = tl.load(gate + row * stride_gate).to(tl.float32)
    if ACT == "sigmoid":
        result = values.to(tl.float32) / (1.0 + tl.exp(-gates))
    else:
        result = values.to(tl.float32) * gates
    tl.store(out + row * width + column, result.to(values.dtype), mask=mask)


def apply_gate(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """See kernels.ops.apply_gate."""
    out = x.new_empty(x.shape)
    if len(x):
        gate_launch(x, gate, activation, out).run()
    return out


def gate_launch(x: torch.Tensor, gate: torch.Tensor, activation: str, out: torch.Tensor) -> Launch:
    """The launch of `gate_kernel`. out: [N, F], contiguous."""
    num, width = x.shape
    args = {
        "x": x,
        "gate": gate,
        "out": out,
        "width": width,
        "stride_x": x.stride(0),
        "stride_gate": gate.stride(0),
        "IS_WIDE": gate.shape[1] == width,
        "ACT": activation,
        "TILE": TILE,
    }
    return Launch(gate_kernel, (num, triton.cdiv(width, TILE)), args, 4, 1)


@triton.jit(do_not_specialize=["num"])
def relu_squared_kernel(x, out, num, TILE: tl.constexpr):
    """One program per block of TILE elements: out = max(x, 0) ** 2."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(x + place, mask=place < num, other=0.0).to(tl.float32)
    values = tl.where(values < 0.0, 0.0, values * values)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < num)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """See kernels.ops.relu_squared."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        relu_squared_launch(x, out).run()
    return out


def relu_squared_launch(x: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch of `relu_squared_kernel` for contiguous tensors."""
    args = {"x": x, "out": out, "num": x.numel(), "TILE": TILE}
    return Launch(relu_squared_kernel, (triton.cdiv(x.numel(), TILE),), args, 4, 1)


@triton.jit(do_not_specialize=["num"])
def activate_kernel(x, out, num, ACT: tl.constexpr, TILE: tl.constexpr):
    """One program per block of TILE elements: out = ACT(x)."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(x + place, mask=place < num, other=0.0).to(tl.float32)
    tl.store(out + place, activated(values, ACT).to(out.dtype.element_ty), mask=place < num)


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """See kernels.ops.activate."""
    if act not in SINGLE_ACTS:
        known = ", ".join(map(repr, SINGLE_ACTS))
        raise ValueError(f"activation {act!r} is unknown; use one of {known}")
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        again(
            FORMS,
            ("activate", x.shape, x.dtype, act, x.get_device()),
            (x, out),
            lambda: [activate_launch(x, out, act)],
        )
    return out


def activate_launch(x: torch.Tensor, out: torch.Tensor, act: str) -> Launch:
    """The launch of `activate_kernel` for contiguous tensors."""
    args = {"x": x, "out": out, "num": x.numel(), "ACT": act, "TILE": TILE}
    return Launch(activate_kernel, (triton.cdiv(x.numel(), TILE),), args, 4, 1)


def configurations() -> Iterator[Launch]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for act in ACTS:
            gate_up = torch.empty((64, 2 * 3072), dtype=dtype, device="meta")
            yield act_mul_launch(gate_up, gate_up[:, :3072], act)
        rows = torch.empty((64, 3072), dtype=dtype, device="meta")
        yield relu_squared_launch(rows, rows)
        for act in SINGLE_ACTS:
            yield activate_launch(rows, rows, act)
        for gate, activation in ((rows, ""), (rows, "sigmoid"), (rows[:, :1], "sigmoid")):
            yield gate_launch(rows, gate, activation, rows)
