"""The gated delta rule on GPUs against plain torch in float64."""

from typing import Any

import pytest
import torch
from support import delta_checks
from support.state_steps import STEPS

from kernels.triton import delta_rule


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", [(1, 2, 16, 16), (1, 3, 12, 40)], ids=str)
def test_outputs_and_states(shape: tuple[int, int, int, int], step: str) -> None:
    delta_checks.check_against_reference(delta_rule.gated_delta_rule, torch.float32, step, shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_two_bytes(dtype: torch.dtype) -> None:
    delta_checks.check_against_reference(
        delta_rule.gated_delta_rule, dtype, "drafts", (1, 2, 16, 16)
    )


@pytest.mark.parametrize("are_alike", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 16, 16), (2, 2, 12, 40)], ids=str)
def test_prompts_in_chunks(shape: tuple[int, int, int, int], are_alike: bool) -> None:
    """Their states differ by at most 1e-5 from float64, as those of other sequences do."""
    rule = delta_rule.gated_delta_rule
    delta_checks.check_against_reference(rule, torch.bfloat16, "chunks", shape, are_alike=are_alike)


def test_batch_invariant_prompts_in_parts_give_the_same_bits() -> None:
    def rule(*given: Any) -> torch.Tensor:
        given[-1].batch_invariant = True
        return delta_rule.gated_delta_rule(*given)

    delta_checks.check_cuts_of_a_prompt(rule, torch.bfloat16, (1, 2, 16, 16))


def test_a_prompt_in_parts_gives_the_same_bits() -> None:
    shape = (1, 2, 16, 16)
    delta_checks.check_cuts_of_a_prompt(delta_rule.gated_delta_rule, torch.float32, shape)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_states_of_16_bits(kept: torch.dtype) -> None:
    rule, shape = delta_rule.gated_delta_rule, (1, 2, 16, 16)
    delta_checks.check_against_reference(rule, torch.float32, "drafts", shape, kept)


@pytest.mark.parametrize(
    "kept", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16]
)
def test_a_prompt_in_parts_with_states_of_16_bits(kept: torch.dtype) -> None:
    rule, shape = delta_rule.gated_delta_rule, (1, 2, 16, 16)
    delta_checks.check_cuts_of_a_prompt(rule, torch.float32, shape, kept)
