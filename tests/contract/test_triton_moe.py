"""Mixtures of experts in Triton, interpreted."""

import triton_interpreter


def test_mixtures_agree_with_a_plain_loop() -> None:
    triton_interpreter.check("test_moe.py")
