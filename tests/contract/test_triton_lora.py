"""Low-rank adapters in Triton, interpreted."""

import pytest
from support import triton_interpreter

pytestmark = pytest.mark.timeout(300)  # a process of its own, maybe beside others


def test_adapters_agree_with_a_plain_loop() -> None:
    triton_interpreter.check("test_lora.py")
