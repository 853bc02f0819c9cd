"""The copies of recurrent states on GPUs: every byte has its place in blocks of the KV pool."""

from collections.abc import Iterator

import pytest
import torch
from support import copy_checks, triton_interpreter

from kernels.bodies import CPU_TENSORS

pytestmark = pytest.mark.skipif(
    not triton_interpreter.IS_INTERPRETING, reason="copies of tensors on the CPU"
)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    CPU_TENSORS.go_to_triton(True)
    yield
    CPU_TENSORS.go_to_triton(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", copy_checks.PARTS)
@pytest.mark.parametrize("shapes", copy_checks.SHAPES)
def test_a_state_survives_in_any_blocks(shapes, parts, dtype):
    copy_checks.check_states_in_blocks(shapes, parts, dtype)


def test_pieces_of_several_tiles():
    copy_checks.check_states_in_blocks(((3000,), (17, 129)), (2600, 12))
