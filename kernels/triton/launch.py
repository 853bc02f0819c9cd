"""A kernel with everything its launch needs, so that it can be run, or only compiled."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton


class Launch(NamedTuple):
    """One launch: `run` it where its tensors lie, or `compile` it for a target that is not here.

    fills_registers: NVIDIA's assembler likes to spill a little where that lets one more program
    onto a processor; True says that no such gain is worth a spill.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    num_warps: int
    num_stages: int
    fills_registers: bool = False

    def options(self) -> dict[str, int]:
        sizes = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return sizes | ({"maxnreg": 255} if self.fills_registers else {})

    def run(self) -> None:
        self.kernel[self.grid](**self.args, **self.options())

    def compile(self) -> Any:
        """The compiled kernel, specialised by the very path that a launch takes."""
        return self.kernel.warmup(**self.args, grid=self.grid, **self.options())


def is_interpreting() -> bool:
    """Whether kernels of this process run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def arch_of(x: torch.Tensor) -> str:
    """The family of devices, as tuning knows them, that a launch on this tensor is for.

    A tensor on the CPU stands for the driver's target: something is compiled, or interpreted.
    """
    if is_interpreting():
        return "sm_90"
    return _arch_of_device(x.device.index) if x.is_cuda else _arch_of_target()


@cache
def _arch_of_device(index: int) -> str:
    with torch.cuda.device(index):
        return _arch_of_target()


def _arch_of_target() -> str:
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    if target.arch < 80:
        raise ValueError(f"compute capability {target.arch / 10} is too old: 8.0 is the least")
    return "sm_90" if target.arch >= 90 else "sm_80"
