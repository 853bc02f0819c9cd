"""The gated delta rule on a CPU against plain torch in float64."""

import pytest
import torch
from support import delta_checks
from support.delta_checks import SHAPES, Given
from support.state_steps import KEPT, STEPS, Part, meta_of

import kernels
from kernels.cpu.threads import num_threads, set_threads

DTYPES = (torch.float32, torch.bfloat16)
by_dtype = pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.isa
@by_dtype
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_states(
    shape: tuple[int, int, int, int], step: str, dtype: torch.dtype
) -> None:
    delta_checks.check_against_reference(kernels.gated_delta_rule, dtype, step, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt_in_parts_gives_the_same_bits(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    delta_checks.check_cuts_of_a_prompt(kernels.gated_delta_rule, dtype, shape)


@pytest.mark.isa
@pytest.mark.parametrize("kept", KEPT)
def test_states_of_16_bits(kept: torch.dtype) -> None:
    rule = kernels.gated_delta_rule
    for shape in SHAPES[1:]:
        for step in STEPS:
            delta_checks.check_against_reference(rule, torch.bfloat16, step, shape, kept)
        delta_checks.check_cuts_of_a_prompt(rule, torch.bfloat16, shape, kept)


def test_threads_and_neighbours_change_no_bit() -> None:
    shape, parts = (1, 2, 24, 512), [Part(1, True)] * 3 + [Part(70), Part(5, True, 2)]
    given, state = Given(shape, torch.float32, 78), torch.randn(len(parts) * 5, 2, 24, 512)
    weights = given.rate, given.bias
    before, results = num_threads(), []
    try:
        for threads in (1, 3):
            set_threads(threads)
            whole = state.clone(), meta_of(parts)
            out = kernels.gated_delta_rule(given.qkv, given.gates, *weights, *whole)
            results.append((out, whole[0]))
    finally:
        set_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    alone = state.clone(), meta_of(parts[3:4])
    got = kernels.gated_delta_rule(given.qkv[3:73], given.gates[3:73], *weights, *alone)
    assert torch.equal(got, results[0][0][3:73])
