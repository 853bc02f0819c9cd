"""Low-rank adapters in Triton, interpreted."""

import triton_interpreter


def test_adapters_agree_with_a_plain_loop() -> None:
    triton_interpreter.check("test_lora.py")
