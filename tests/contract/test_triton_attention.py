"""Triton's attention, and its write of K and V, against the reference, under the interpreter."""

import pytest
from support import triton_interpreter


def test_attention_and_write_agree_with_the_reference() -> None:
    triton_interpreter.check("test_attention.py", "test_shares.py", "test_kv_write.py")


@pytest.mark.slow
def test_every_group_and_head_size_agrees_with_the_reference() -> None:
    triton_interpreter.check("test_attention.py", options=("-m", "slow"))
