"""What `tests/interpreted` holds, in processes of their own, in which Triton's kernels are computed
by its interpreter: two for the short forms, since each takes long to start."""

import pytest
from support import triton_interpreter


def test_kernels_agree_with_the_reference() -> None:
    names = ("attention", "shares", "kv_write", "kv_pool", "pointwise", "moe", "index", "states")
    more = ("logits", "quant", "gemv", "sampling", "causal_conv", "selective_scan", "delta_rule")
    last = ("low_rank", "sampling_parts")
    triton_interpreter.check(*(f"test_{name}.py" for name in (*names, *more, *last)))


def test_the_worker_of_a_gpu_gives_the_tokens_of_a_cpu_and_keeps_order() -> None:
    names = ("fake_cuda", "quantized_models", "adapters", "pictures", "pool_blocks", "fake_ranks")
    triton_interpreter.check(*(f"test_{name}.py" for name in names))


def test_kernels_of_options_agree_with_the_reference() -> None:
    triton_interpreter.check("test_invariant.py", "test_batch_invariant.py", "test_fp8_cache.py")


@pytest.mark.slow
def test_long_forms_of_all_interpreted_tests() -> None:
    triton_interpreter.check("", options=("-m", "slow"))
