"""The selective scans of GPUs against plain torch in float64."""

from typing import Any

import pytest
import torch
from support import scan_checks
from support.state_steps import STEPS

from kernels import triton as kernels

DTYPES = (torch.float32, torch.bfloat16)


def each_with_a_dtype(*shapes: tuple[int, ...]) -> list[Any]:
    """Parameters for all shapes and dtypes; without `slow`, one dtype for each shape."""
    return [
        pytest.param(shape, dtype, marks=[pytest.mark.slow] * (number % 2 != index))
        for number, shape in enumerate(shapes)
        for index, dtype in enumerate(DTYPES)
    ]


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("shape", "dtype"), each_with_a_dtype((4, 2, 16, 16), (2, 1, 12, 20)))
def test_scan_by_heads(shape: scan_checks.Shape, step: str, dtype: torch.dtype) -> None:
    scan_checks.check_heads(kernels.head_scan, dtype, step, shape)


@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (2, 1, 12, 20)])
def test_prompts_in_chunks(shape: scan_checks.Shape) -> None:
    """Their states differ by at most 1e-5 from float64, as those of other sequences do."""
    scan_checks.check_heads(kernels.head_scan, torch.bfloat16, "chunks", shape)


def test_batch_invariant_prompts_in_parts_give_the_same_bits() -> None:
    def scan(*given: Any) -> torch.Tensor:
        given[-1].batch_invariant = True
        return kernels.head_scan(*given)

    scan_checks.check_cuts_of_heads(scan, torch.bfloat16, (2, 1, 16, 16))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("shape", "dtype"), each_with_a_dtype((16, 64), (5, 24)))
def test_scan_by_channels(shape: tuple[int, int], step: str, dtype: torch.dtype) -> None:
    scan_checks.check_channels(kernels.channel_scan, dtype, step, shape)


def test_a_prompt_in_parts_gives_the_same_bits() -> None:
    scan_checks.check_cuts_of_heads(kernels.head_scan, torch.float32, (2, 1, 16, 16))
    scan_checks.check_cuts_of_channels(kernels.channel_scan, torch.float32, (8, 32))


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_states_of_16_bits(kept: torch.dtype) -> None:
    scan_checks.check_heads(kernels.head_scan, torch.float32, "drafts", (4, 2, 16, 16), kept)
    scan_checks.check_channels(kernels.channel_scan, torch.float32, "drafts", (5, 24), kept)


@pytest.mark.parametrize(
    "kept", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16]
)
def test_a_prompt_in_parts_with_states_of_16_bits(kept: torch.dtype) -> None:
    scan_checks.check_cuts_of_heads(kernels.head_scan, torch.float32, (2, 1, 16, 16), kept)
    scan_checks.check_cuts_of_channels(kernels.channel_scan, torch.float32, (8, 32), kept)
