"""Mixtures of experts in Triton, interpreted."""

import pytest
from support import triton_interpreter

pytestmark = pytest.mark.timeout(300)  # a process of its own, maybe beside others


def test_mixtures_agree_with_a_plain_loop() -> None:
    triton_interpreter.check("test_moe.py")
