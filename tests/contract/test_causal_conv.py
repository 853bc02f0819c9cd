"""The causal convolution of a CPU against plain torch in float64."""

import pytest
import torch
from support import conv_checks
from support.state_steps import STEPS, Part, meta_of

import kernels
from kernels.cpu.threads import num_threads, set_threads

DTYPES = (torch.float32, torch.bfloat16)
# A kernel is compiled for each dtype, activation and number of taps; float16 has none. The default
# tier tests each of them, and some of their combinations.
ACTIVATIONS = [
    *(("silu", dtype) for dtype in (*DTYPES, torch.float16)),
    *(("", dtype) for dtype in (torch.float32, torch.float16)),
    pytest.param("", torch.bfloat16, marks=pytest.mark.slow),
]
TAPS = [
    *((taps, torch.float32) for taps in (2, 3, 4)),
    *((taps, torch.bfloat16) for taps in (1, 4)),
    pytest.param(1, torch.float32, marks=pytest.mark.slow),
    *(pytest.param(taps, torch.bfloat16, marks=pytest.mark.slow) for taps in (2, 3)),
]


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.isa
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("activation", "dtype"), ACTIVATIONS)
def test_outputs_and_states(step: str, activation: str, dtype: torch.dtype) -> None:
    conv_checks.check_against_reference(kernels.causal_conv, dtype, step, activation)


@pytest.mark.parametrize(("taps", "dtype"), TAPS)
def test_a_prompt_in_parts_gives_the_same_bits(taps: int, dtype: torch.dtype) -> None:
    conv_checks.check_cuts_of_a_prompt(kernels.causal_conv, dtype, taps)


def test_threads_and_neighbours_change_no_bit() -> None:
    parts = [Part(1, True)] * 19 + [Part(70), Part(5, True, 2)]
    meta = meta_of(parts)
    x, weight = torch.randn(94, 600), torch.randn(600, 4)
    state = torch.randn(len(parts) * 5, 3, 600)
    before, results = num_threads(), []
    try:
        for threads in (1, 3):
            set_threads(threads)
            results.append(kernels.causal_conv(x, weight, None, "silu", state.clone(), meta))
    finally:
        set_threads(before)
    assert torch.equal(*results)
    alone = meta_of(parts[-2:-1])
    got = kernels.causal_conv(x[19:89], weight, None, "silu", state.clone(), alone)
    assert torch.equal(got, results[0][19:89])


def test_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="'gelu'"):
        kernels.causal_conv(
            torch.zeros(1, 4), torch.zeros(4, 2), None, "gelu", torch.zeros(5, 1, 4),
            meta_of([Part(1)]),
        )  # fmt: skip
