"""Checks of selective scans, which the bodies of CPUs and GPUs have to pass."""

from collections.abc import Callable

import torch

from kernels import StateMeta, reference
from kernels.reference.selective_scan import ChannelScan, HeadScan
from support.state_steps import (
    LONG_STEPS,
    STATE_TOLERANCE,
    STEPS,
    check_cuts,
    check_states,
    exact_states,
    meta_of,
    num_rows,
)

Scan = Callable[..., torch.Tensor]
Shape = tuple[int, int, int, int]  # heads, groups, state size, head width
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def head_layer(heads: int, limits: tuple[float, float] = (0.0, float("inf"))) -> HeadScan:
    return HeadScan(-torch.rand(heads) * 4, torch.randn(heads), torch.randn(heads), limits)


def head_inputs(num: int, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random xbc and dt, whose rows are apart. Outputs, each a sum over the state size, have about
    the same magnitude for all shapes."""
    heads, groups, size, width = shape
    columns = heads * width + 2 * groups * size
    rows = torch.randn(num, columns + heads + 8)
    rows[:, 4 + columns - groups * size : 4 + columns] /= size**0.5
    rows = rows.to(dtype)
    return rows[:, 4 : 4 + columns], rows[:, columns + 8 :] * 3


def check_heads(
    scan: Scan, dtype: torch.dtype, step: str, shape: Shape, kept: torch.dtype = torch.float32
) -> None:
    """Outputs and states of a scan by heads are those of float64. kept: the dtype of states."""
    meta, layer = meta_of((STEPS | LONG_STEPS)[step]), head_layer(shape[0], (0.01, 2.0))
    num = int(meta.query_start[-1])
    xbc, dt = head_inputs(num + 2, shape, dtype)
    xbc[num:], dt[num:] = torch.nan, torch.nan  # these rows belong to no sequence
    state = _states(meta, (shape[0], *shape[2:]), kept)
    _compare(lambda *given: scan(*given[:2], layer, *given[2:]), (xbc, dt), state, meta,
             lambda *given: reference.head_scan(*given[:2], layer, *given[2:]))  # fmt: skip


def check_channels(
    scan: Scan,
    dtype: torch.dtype,
    step: str,
    shape: tuple[int, int],
    kept: torch.dtype = torch.float32,
) -> None:
    """Outputs and states of a scan by channels are those of float64. shape: S and C; kept: the
    dtype of states."""
    meta = meta_of(STEPS[step])
    num = int(meta.query_start[-1])
    layer = channel_layer(*shape)
    given = channel_inputs(num + 2, shape, dtype)
    for one in given:
        one[num:] = torch.nan
    state = _states(meta, shape, kept)
    _compare(lambda *all_: scan(*all_[:4], layer, *all_[4:]), given, state, meta,
             lambda *all_: reference.channel_scan(*all_[:4], layer, *all_[4:]))  # fmt: skip


def channel_layer(size: int, width: int) -> ChannelScan:
    return ChannelScan(-torch.rand(size, width) * 4, torch.randn(width), torch.randn(width))


def channel_inputs(
    num: int, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Random x, dt, bc and gate; rows of bc and gate are apart."""
    size, width = shape
    rows = torch.randn(num, 2 * size + width + 9).to(dtype)
    x, dt = (torch.randn(num, width).to(dtype) for _ in range(2))
    return x, dt, rows[:, 5 : 5 + 2 * size], rows[:, 9 + 2 * size :]


def _states(meta: StateMeta, shape: tuple[int, ...], kept: torch.dtype) -> torch.Tensor:
    """States that are NaN but in the rows that a step reads."""
    state = torch.full((num_rows(meta), *shape), torch.nan, dtype=kept)
    reads = meta.state_reads[meta.state_reads >= 0].long()
    state[reads] = torch.randn(len(reads), *shape).to(kept)
    return state


def _compare(
    scan: Scan, given: tuple[torch.Tensor, ...], state: torch.Tensor, meta: StateMeta, truth: Scan
) -> None:
    num, dtype, before = int(meta.query_start[-1]), given[0].dtype, state.clone()
    exact = exact_states(state)
    got = scan(*given, state, meta)
    wanted = truth(*(one.double() for one in given), exact, meta)
    assert got.dtype is dtype and not got[num:].any()
    limit = max(TOLERANCE[dtype], STATE_TOLERANCE[state.dtype])
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=limit)
    check_states(state, exact)
    reads = meta.state_reads[meta.state_reads >= 0].long()
    assert torch.equal(state[reads], before[reads])


CUTS = ((1,) * 41, (2, 1, 20, 18), (40, 1), (16, 25))


def check_cuts_of_heads(
    scan: Scan, dtype: torch.dtype, shape: Shape, kept: torch.dtype = torch.float32
) -> None:
    """The bits of a scan by heads do not depend on how a prompt is divided."""
    (xbc, dt), layer = head_inputs(41, shape, dtype), head_layer(shape[0])
    state = torch.randn(2, shape[0], *shape[2:]).to(kept)
    for sizes in CUTS:
        check_cuts(lambda part, meta: scan(xbc[part], dt[part], layer, state, meta), 41, sizes)


def check_cuts_of_channels(
    scan: Scan, dtype: torch.dtype, shape: tuple[int, int], kept: torch.dtype = torch.float32
) -> None:
    """The bits of a scan by channels do not depend on how a prompt is divided."""
    given, layer = channel_inputs(41, shape, dtype), channel_layer(*shape)
    state = torch.randn(2, *shape).to(kept)
    for sizes in CUTS:
        check_cuts(
            lambda part, meta: scan(*(one[part] for one in given), layer, state, meta), 41, sizes
        )
