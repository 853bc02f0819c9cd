"""The sampler and all it consists of in Triton, interpreted."""

import pytest
from support import triton_interpreter

pytestmark = pytest.mark.timeout(300)  # a process of its own, maybe beside others


def test_sampler_agrees_with_the_other_bodies_and_drafts_are_verified_exactly() -> None:
    triton_interpreter.check("test_sampling.py")
