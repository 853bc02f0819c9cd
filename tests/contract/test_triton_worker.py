"""The GPU's worker from end to end on the CPU, and whole models that keep their weights packed.

Their kernels are interpreted, in one process, for it takes long to import what makes models.
"""

import pytest
from support import triton_interpreter


def test_cuda_worker_agrees_with_the_cpu_worker_and_weights_stay_packed() -> None:
    triton_interpreter.check("test_cuda_worker.py", "test_quantized_models.py")


def test_quantised_experts_give_the_tokens_of_the_cpu_worker() -> None:
    triton_interpreter.check("test_quantized_experts.py")


def test_order_memory_graphs_and_waits_are_right_on_a_made_up_device() -> None:
    triton_interpreter.check("test_fake_cuda.py")


@pytest.mark.slow
def test_long_forms_of_all_interpreted_tests() -> None:
    triton_interpreter.check("", options=("-m", "slow"))
