"""Which device computes, and which bodies."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import EngineArgs
from engine.assets import BOX_MODEL
from engine.config.decide import resolve
from engine.config.env import INTERPRET_CUDA
from engine.config.model import read_model_info
from engine.errors import ConfigError
from engine.messages.step import EMPTY, StepPlan
from engine.worker.device import make_platform, resolve_device
from engine.worker.platform.cuda import CudaPlatform
from engine.worker.worker import ModelWorker
from kernels import reference, rms_norm
from kernels.bodies import CPU_TENSORS, triton_for

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_a_gpu_is_refused_rather_than_replaced() -> None:
    with pytest.raises(
        ConfigError, match=r"'cuda', but torch .* finds no GPU; use 'cpu' or 'auto'"
    ):
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


class Devices:
    """The current device of each thread, as a driver keeps it: 0 unless a thread sets another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of = threading.local()
        patches = {"current_device": self.current, "device": self.on, "Stream": lambda _: None}
        for name, value in {**patches, "graph_pool_handle": lambda: None}.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def current(self) -> int:
        return getattr(self._of, "index", 0)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self._of.index = self.current(), device.index
        yield
        self._of.index = before


def test_any_thread_steps_on_the_device_that_the_worker_was_made_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, used = Devices(monkeypatch), []
    driver = SimpleNamespace(
        launch=lambda plan: used.append(devices.current()),
        sample=lambda ticket, masks: used.append(devices.current()),
    )
    monkeypatch.setattr(ModelWorker, "driver", driver)
    with devices.on(torch.device("cuda", 1)):  # a program's own choice
        platform = CudaPlatform()
    config, info = EngineArgs().create_config(), read_model_info(str(BOX_MODEL))
    worker = ModelWorker(resolve(config, info, "cuda"), info, platform)

    columns = (EMPTY.astype(np.intp), *(EMPTY,) * 5)
    plan = StepPlan(0, *columns, [], EMPTY, EMPTY, EMPTY, [], 0)

    def step() -> None:
        worker.launch(plan)
        worker.sample(None, None)  # type: ignore[arg-type]
        used.append(devices.current())  # the thread's own choice stays

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert used == [1, 1, 0]


def test_tensors_on_the_cpu_are_computed_by_the_cpu() -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    assert triton_for(x) is None
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
