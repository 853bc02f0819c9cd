"""A step's inputs built by Triton, interpreted."""

import triton_interpreter


def test_index_kernels_agree_with_the_reference() -> None:
    triton_interpreter.check("test_index.py")
