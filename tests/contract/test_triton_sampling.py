"""The sampler and all it consists of in Triton, interpreted."""

from support import triton_interpreter


def test_sampler_agrees_with_the_other_bodies_and_drafts_are_verified_exactly() -> None:
    triton_interpreter.check("test_sampling.py")
