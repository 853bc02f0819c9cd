"""Triton's small kernels against plain loops, under the interpreter: one process for all of them,
for it takes longer to start than they run."""

from support import triton_interpreter


def test_kernels_of_layers_agree_with_the_reference() -> None:
    triton_interpreter.check(
        *("test_pointwise.py", "test_moe.py", "test_lora.py", "test_index.py"),
        *("test_logits.py", "test_quant.py"),
    )
