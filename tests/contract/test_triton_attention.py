"""Triton's attention kernels against the reference, under the interpreter."""

import pytest
from support import triton_interpreter


@pytest.mark.timeout(300)
def test_attention_agrees_with_the_reference() -> None:
    triton_interpreter.check("test_attention.py")
