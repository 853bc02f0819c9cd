"""Checks of a causal convolution, which the bodies of CPUs and GPUs have to pass."""

from collections.abc import Callable

import torch

from kernels import reference
from support.state_steps import STEPS, check_cuts, meta_of, num_rows

Conv = Callable[..., torch.Tensor]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size).to(dtype)


def check_against_reference(conv: Conv, dtype: torch.dtype, step: str, activation: str) -> None:
    """Outputs and states are those of float64; what is not to be read is NaN."""
    meta, width, taps = meta_of(STEPS[step]), 200, 4
    num = int(meta.query_start[-1])
    wide = random(num + 3, width + 30, dtype=dtype)  # three rows belong to no sequence
    wide[num:] = torch.nan
    x, weight = wide[:, 10 : 10 + width], random(width, taps, dtype=dtype)
    bias = random(width, dtype=dtype) if activation else None
    state = torch.full((num_rows(meta), taps - 1, width), torch.nan, dtype=dtype)
    reads = meta.state_reads[meta.state_reads >= 0].long()
    state[reads] = random(len(reads), taps - 1, width, dtype=dtype)
    exact, before = state.double(), state.clone()
    got = conv(x, weight, bias, activation, state, meta)
    wanted = reference.causal_conv(
        x.double(),
        weight.double(),
        None if bias is None else bias.double(),
        activation,
        exact,
        meta,
    )
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=limit)
    assert got.dtype is dtype and not got[num:].any()
    assert torch.equal(state.double().nan_to_num(7), exact.nan_to_num(7))
    assert torch.equal(state[reads], before[reads])


def check_cuts_of_a_prompt(conv: Conv, dtype: torch.dtype, taps: int) -> None:
    """The bits do not depend on how a prompt is divided."""
    width, num = 70, 41
    x, weight = random(num, width, dtype=dtype), random(width, taps, dtype=dtype)
    bias, state = random(width, dtype=dtype), random(2, taps - 1, width, dtype=dtype)
    for sizes in ((1,) * num, (2, 1, 20, 18), (40, 1)):
        check_cuts(lambda part, meta: conv(x[part], weight, bias, "silu", state, meta), num, sizes)
