"""Norms and gated activations in Triton, interpreted."""

import triton_interpreter


def test_pointwise_kernels_agree_with_the_reference() -> None:
    triton_interpreter.check("test_pointwise.py")
