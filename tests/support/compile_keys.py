"""What a GPU would compile, by Triton's own keys: nothing is compiled, and no kernel runs.

The GPU's worker is driven on the CPU. Where it launches a kernel, Triton binds the arguments and
works out the key by which it would look for what it has compiled: that is kept. What a kernel would
have written is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import compute_cache_key

from engine.config.env import INTERPRET_CUDA
from engine.worker.platform.host import HostPlatform
from kernels.bodies import CPU_TENSORS, CpuTensors
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, compiling_for


class Keys:
    """Keys met since the beginning, and how each was met first."""

    def __init__(self) -> None:
        self.phase = "start"
        self.first: dict[Any, str] = {}
        self.num_launches = 0

    def met_in(self, phase: str) -> list[str]:
        return [told for told in self.first.values() if told.startswith(f"{phase}: ")]

    def meet(self, launch: Launch) -> None:
        self.num_launches += 1
        key = key_of(launch)
        if key not in self.first:
            self.first[key] = f"{self.phase}: {_told(launch)}"


def key_of(launch: Launch) -> Any:
    """By which Triton would find the launch's kernel; the same for another launch: same kernel."""
    kernel = launch.kernel
    _, hashes, _, _, binder = kernel.device_caches[0]
    mode = triton.knobs.compilation.instrumentation_mode
    options = {**launch.options(), "debug": False, "instrumentation_mode": mode}
    _, specialisation, found = binder(**launch.args, **options)
    return id(kernel), compute_cache_key(hashes, specialisation, found)


def _told(launch: Launch) -> str:
    """The kernel, and what of its arguments it is compiled for or by."""
    plain = {
        name: value
        for name, value in launch.args.items()
        if not isinstance(value, torch.Tensor) or value.data_ptr() % 16
    }
    given = {name: "unaligned" if torch.is_tensor(one) else one for name, one in plain.items()}
    return f"{launch.kernel.fn.__name__} {given} {launch.options()}"


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    """Within it ``device="cuda"`` is the CPU in the place of an H100 that computes zeros."""
    keys = Keys()
    monkeypatch.setenv(INTERPRET_CUDA, "1")
    monkeypatch.setattr(CPU_TENSORS, "are_interpreted", False)  # as it will be again
    monkeypatch.setattr(Launch, "run", lambda launch: keys.meet(launch))
    monkeypatch.setattr(
        CpuTensors, "go_to_triton", lambda self, asked: setattr(self, "are_interpreted", asked)
    )
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(HostPlatform, "compiles", True)
    with compiling_for(DEVICES["sm_90"]):
        yield keys
