"""Kernels of Triton held to references, by whatever computes them here.

Triton's interpreter, set before Triton is imported (see triton_interpreter); or a GPU, where there
is one. Otherwise there is nothing to collect.
"""

import pytest
import torch
from support import triton_interpreter

IS_ON_GPU = not triton_interpreter.IS_INTERPRETING and torch.cuda.is_available()

collect_ignore_glob = [] if triton_interpreter.IS_INTERPRETING or IS_ON_GPU else ["test_*.py"]
if triton_interpreter.IS_INTERPRETING:
    triton_interpreter.repair()
elif IS_ON_GPU:
    from support import lent_to_gpu

    lent_to_gpu.lend_all()
    # Whole models on the CPU, of which Triton computes a part: test_gpu_quantized does it whole.
    collect_ignore_glob = ["test_quantized_models.py", "test_encoders.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    if IS_ON_GPU:
        item.add_marker(pytest.mark.gpu)
