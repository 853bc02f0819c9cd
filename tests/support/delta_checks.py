"""Checks of the gated delta rule, which the bodies of CPUs and GPUs have to pass."""

from collections.abc import Callable

import torch

from kernels import reference
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

Rule = Callable[..., torch.Tensor]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Key heads, value heads, and the sizes of keys and values.
SHAPES = ((2, 4, 16, 16), (1, 3, 12, 40), (3, 3, 40, 5), (1, 2, 128, 128))


class Given:
    """Random inputs of the rule for some tokens, of which the last belong to no sequence and are
    NaN."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, tokens: int, padding: int = 0
    ) -> None:
        key_heads, heads, key_dim, dim = shape
        self.qkv = random(tokens + padding, 2 * key_heads * key_dim + heads * dim, dtype=dtype)
        self.gates = random(tokens + padding, 2 * heads, dtype=dtype)
        self.qkv[tokens:] = self.gates[tokens:] = torch.nan
        self.rate, self.bias = -4 * torch.rand(heads), torch.randn(heads)

    def make_alike(self, tokens: int, width: int) -> None:
        """Give all tokens nearly the same queries and keys, a large beta and a slow decay. width:
        columns of queries and keys."""
        one = random(1, width) + 0.01 * random(tokens, width)
        self.qkv[:tokens, :width] = one.to(self.qkv.dtype)
        self.gates[:tokens, : self.gates.shape[1] // 2] = 6
        self.rate /= 100

    def exact(self) -> tuple[torch.Tensor, ...]:
        return tuple(x.double() for x in (self.qkv, self.gates, self.rate, self.bias))


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size).to(dtype)


def close(
    got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, of_states: float = 0.0
) -> None:
    assert got.dtype is dtype
    limit = max(TOLERANCE[dtype], of_states)
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=limit)


def check_against_reference(
    rule: Rule,
    dtype: torch.dtype,
    step: str,
    shape: tuple[int, int, int, int],
    kept: torch.dtype = torch.float32,
    are_alike: bool = False,
) -> None:
    """Outputs and states are those of float64; what is not to be read is NaN. kept: the dtype of
    states, to which the truth rounds them, too. are_alike: all keys are nearly the same, and each
    value replaces the one before it."""
    meta, (_, heads, key_dim, dim) = meta_of((STEPS | LONG_STEPS)[step]), shape
    num = int(meta.query_start[-1])
    given = Given(shape, dtype, num, padding=3)
    if are_alike:
        given.make_alike(num, 2 * shape[0] * key_dim)
    state = torch.full((num_rows(meta), heads, key_dim, dim), torch.nan, dtype=kept)
    reads = meta.state_reads[meta.state_reads >= 0].long()
    state[reads] = random(len(reads), heads, key_dim, dim, dtype=kept)
    exact, before = exact_states(state), state.clone()
    got = rule(given.qkv, given.gates, given.rate, given.bias, state, meta)
    wanted = reference.gated_delta_rule(*given.exact(), exact, meta)
    close(got, wanted, dtype, STATE_TOLERANCE[kept])
    assert not got[num:].any()
    check_states(state, exact)
    assert torch.equal(state[reads], before[reads])


def check_cuts_of_a_prompt(
    rule: Rule,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    kept: torch.dtype = torch.float32,
) -> None:
    """The bits do not depend on how a prompt is divided, nor do those of the state after it."""
    num, (_, heads, key_dim, dim) = 41, shape
    given, state = Given(shape, dtype, num), random(2, heads, key_dim, dim, dtype=kept)
    ends = []

    def step(part: slice, meta: object) -> torch.Tensor:
        out = rule(given.qkv[part], given.gates[part], given.rate, given.bias, state, meta)
        if part.stop == num:
            ends.append(state[int(meta.state_writes[0, 0])].clone())
        return out

    for sizes in ((1,) * num, (2, 1, 20, 18), (40, 1)):
        check_cuts(step, num, sizes)
    assert all(torch.equal(end, ends[0]) for end in ends)
