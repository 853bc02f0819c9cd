"""The causal convolution of GPUs against plain torch in float64."""

import pytest
import torch
from support import conv_checks
from support.state_steps import STEPS

from kernels.triton import causal_conv

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *(("silu", dtype) for dtype in DTYPES),
        ("", torch.float32),
        *(pytest.param("", dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:]),
    ],
)
def test_outputs_and_states(step: str, activation: str, dtype: torch.dtype) -> None:
    conv_checks.check_against_reference(causal_conv, dtype, step, activation)


@pytest.mark.parametrize("taps", [2, 4])
def test_a_prompt_in_parts_gives_the_same_bits(taps: int) -> None:
    conv_checks.check_cuts_of_a_prompt(causal_conv, torch.float32, taps)
