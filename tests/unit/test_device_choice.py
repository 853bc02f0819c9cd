"""Which device computes, and which bodies."""

import pytest
import torch

from engine.config.env import INTERPRET_CUDA
from engine.errors import ConfigError
from engine.worker.device import make_platform, resolve_device
from kernels import reference, rms_norm
from kernels.bodies import CPU_TENSORS, triton_for

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_a_gpu_is_refused_rather_than_replaced() -> None:
    with pytest.raises(ConfigError, match=r"'cuda', but torch .* sees no GPU; use 'cpu' or 'auto'"):
        resolve_device("cuda")
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


@needs_no_gpu
def test_the_cpu_stands_in_only_where_triton_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRET_CUDA, "1")
    assert resolve_device("cuda") == "cuda" and resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=f"{INTERPRET_CUDA} is set, but .*TRITON_INTERPRET=1"):
        make_platform("cuda")
    assert not CPU_TENSORS.are_interpreted


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    with pytest.raises(ConfigError, match=r"Some GPU has compute capability 7\.5, .* 8\.0"):
        make_platform("cuda")


def test_tensors_on_the_cpu_are_computed_by_the_cpu() -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    assert triton_for(x) is None
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
