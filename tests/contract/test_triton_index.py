"""A step's inputs built by Triton, interpreted."""

import pytest
from support import triton_interpreter

pytestmark = pytest.mark.timeout(300)  # a process of its own, maybe beside others


def test_index_kernels_agree_with_the_reference() -> None:
    triton_interpreter.check("test_index.py")
