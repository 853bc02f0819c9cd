"""8-bit products: weights have one scale per output, inputs are quantised per row.

A row is stored as unsigned bytes, x = scale * (byte - 128), because the processor's instructions
multiply unsigned by signed bytes. The 128 is corrected with the sum of each output's weights. Sums
are exact, so a row's results depend neither on the number of rows nor on the body.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernels.cpu import amx, isa
from kernels.cpu.activation import CODES
from kernels.cpu.matmul.byte_bodies import (
    DEEP,
    STEP,
    ZERO_POINT,
    dots_body,
    quantize_body,
    tiles_body,
)
from kernels.cpu.matmul.float32 import PANEL, panels_an_item
from kernels.cpu.matmul.outputs import NO_CHANGE, Change, Scores, Target, largest_ids
from kernels.cpu.native import Kernel
from kernels.cpu.threads import num_threads
from kernels.cpu.vectors import HAS_BYTE_PRODUCT

IS_SUPPORTED = HAS_BYTE_PRODUCT
ACTS = {"silu": 0, "gelu_tanh": 1}

_ENOUGH = 262144  # with fewer multiplications, one thread is faster
_ENOUGH_ROWS = 8  # rows for which quantisation uses several threads
# Rows per item and bytes of their inputs, which stay in the L2 cache: VNNI, then tiles.
_ROWS, _TILE_ROWS, _TILE_BYTES = 288, 256, 5 << 18
_FROM = 4  # rows from which tiles are faster than VNNI


class Int8Weight(NamedTuple):
    """A weight [out, in] = scale * integer, packed for :func:`int8_product`."""

    packed: torch.Tensor  # [panels, in / 4, PANEL, 4] int8, with inputs padded to a multiple of 64
    scales: torch.Tensor  # [panels * PANEL] float32
    sums: torch.Tensor  # [panels * PANEL] int32, 128 times the sum of each output's integers
    num_out: int


def quantize(weight: torch.Tensor) -> Int8Weight:
    """Quantise a weight [out, in] symmetrically, with one scale per output."""
    scales = weight.abs().amax(dim=1).float().div_(127).clamp_(min=1e-30)

    def integers_of(rows: slice) -> torch.Tensor:
        return (weight[rows].float() / scales[rows, None]).round_().to(torch.int8)

    return _packed(weight.shape, scales, integers_of)


def pack_integers(values: torch.Tensor, scales: torch.Tensor) -> Int8Weight:
    """Pack a quantised weight, scale * (value - 128). values: [out, in] uint8; scales: [out]."""
    flip = 0x80  # makes signed bytes of unsigned ones
    return _packed(
        values.shape, scales.float(), lambda rows: (values[rows] ^ flip).view(torch.int8)
    )


def _packed(
    shape: torch.Size, scales: torch.Tensor, integers_of: Callable[[slice], torch.Tensor]
) -> Int8Weight:
    """Pack a weight [out, in]. integers_of: returns the integers [R, in] int8 of some outputs."""
    num_out, num_in = shape
    panels, depth = -(-num_out // PANEL), -(-num_in // STEP) * (STEP // DEEP)
    padded_scales = torch.nn.functional.pad(scales, (0, panels * PANEL - num_out))
    packed = torch.zeros((panels, depth, PANEL, DEEP), dtype=torch.int8)
    sums = torch.zeros(panels * PANEL, dtype=torch.int32)
    for panel in range(panels):
        rows = slice(panel * PANEL, min((panel + 1) * PANEL, num_out))
        integers = integers_of(rows)
        sums[rows] = integers.sum(dim=1, dtype=torch.int32) * ZERO_POINT
        padded = torch.nn.functional.pad(integers, (0, depth * DEEP - num_in))
        count = len(integers)
        packed[panel, :, :count] = padded.view(count, depth, DEEP).transpose(0, 1)
    return Int8Weight(packed, padded_scales, sums, num_out)


def int8_product(
    x: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
    act: str = "",
    body: str | None = None,
) -> torch.Tensor:
    """Return act(x @ weight.T + bias), [N, out], in float32 or bfloat16 (``out_dtype``, by default
    that of x). act: a key of ``kernels.cpu.activation.CODES``, or "" for none. x: [N, in]
    contiguous float32 or bfloat16; bias: [out] float32; body (for tests): a key of BODIES. Rows
    with numbers that are not finite get results that are not finite."""
    out = x.new_empty((len(x), weight.num_out), dtype=out_dtype or x.dtype)
    added = 0 if bias is None else bias.data_ptr()
    plan = _plan(x, weight, weight.num_out, body)
    target = Target(out.data_ptr(), out.element_size(), added, act=CODES[act] + 1 if act else 0)
    _run(plan, x, weight, target)
    return out


def gated_product(
    x: torch.Tensor,
    weight: Int8Weight,
    act: str,
    *,
    body: str | None = None,
    change: Change = NO_CHANGE,
) -> torch.Tensor:
    """Return act(x @ gate) * (x @ up), [N, out / 2] bfloat16, rounded once. weight: gate and up as
    one matrix, its outputs a multiple of two panels; x: [N, in] contiguous float32 or bfloat16;
    act: a key of ACTS; change: of both before the activation."""
    half = weight.num_out // 2
    out = x.new_empty((len(x), half), dtype=torch.bfloat16)
    target = Target(out.data_ptr(), 2, gates=half // PANEL, act=ACTS[act], change=change)
    _run(_plan(x, weight, half, body), x, weight, target)
    return out


def largest(
    x: torch.Tensor, weight: Int8Weight, scores: Scores | None = None, *, body: str | None = None
) -> torch.Tensor:
    """Index of the largest output of each row (the first of equal ones), [N] int32. The outputs are
    not stored. Rows with NaN, +inf or only -inf get -1. x: [N, in] contiguous float32 or bfloat16;
    scores: where to write the largest outputs."""
    plan = _plan(x, weight, weight.num_out, body)
    groups = -(-weight.packed.shape[0] // plan.panels)
    return largest_ids(len(x), groups, partial(_run, plan, x, weight), scores)


class _Plan(NamedTuple):
    body: str
    num_out: int
    threads: int
    rows: int  # per item
    panels: int  # per item


def _plan(x: torch.Tensor, weight: Int8Weight, num_out: int, body: str | None) -> _Plan:
    num, num_in = x.shape
    threads = num_threads() if num * num_in * num_out >= _ENOUGH else 1
    chosen = body or ("tiles" if HAS_TILES and num >= _FROM else "dots")
    panels = -(-num_out // PANEL)
    most = _ROWS
    if chosen != "dots":
        most = min(_TILE_ROWS, max(32, _TILE_BYTES // (weight.packed.shape[1] * DEEP)))
    rows = -(-num // max(1, -(-num // most)))
    rows = max(1, -(-rows // amx.ROWS) * amx.ROWS)
    items = -(-num // rows) * panels
    return _Plan(chosen, num_out, threads, rows, panels_an_item(panels, items, threads))


def _run(plan: _Plan, x: torch.Tensor, weight: Int8Weight, target: Target) -> None:
    num, num_in = x.shape
    depth = weight.packed.shape[1]
    # Tiles read whole groups of rows.
    rows = torch.empty((-(-num // amx.ROWS) * amx.ROWS, depth * DEEP), dtype=torch.uint8)
    scales = torch.empty(num, dtype=torch.float32)
    QUANTIZE[x.element_size()].run(
        plan.threads if num >= _ENOUGH_ROWS else 1,
        x.data_ptr(),
        rows.data_ptr(),
        scales.data_ptr(),
        num,
        num_in,
        depth * DEEP,
    )
    BODIES[plan.body].run(
        plan.threads,
        rows.data_ptr(),
        weight.packed.data_ptr(),
        target.bias,
        target.out,
        scales.data_ptr(),
        weight.scales.data_ptr(),
        weight.sums.data_ptr(),
        num,
        depth,
        plan.num_out,
        plan.rows,
        plan.panels,
        target.size,
        target.ids,
        target.gates,
        target.act,
        *target.change,
    )


# By bytes of an element of x.
QUANTIZE = {cell: Kernel(quantize_body(cell)) for cell in (4, 2)}
BODIES = {
    "dots": Kernel(dots_body, heavy=True),
    "tiles": Kernel(tiles_body(0), heavy=True),
    "soft tiles": Kernel(tiles_body(1), heavy=True),
}

HAS_TILES = isa.LEVEL == "amx" and isa.has("amx-int8")
