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

    def run(self) -> Any:
        """Returns what was compiled; nothing where kernels are interpreted."""
        if needs_triton():
            return self._run_by_triton()
        active = triton.runtime.driver.active
        device = active.get_current_device()
        kinds, values = parameters_of(self.kernel), []
        key = [id(self.kernel), device, self.num_warps, self.num_stages, self.fills_registers]
        for name, is_constant in kinds:
            value = self.args[name]
            values.append(value)
            key.append(value if is_constant else _specialised(value))
        compiled = _COMPILED.get(tuple(key))
        if compiled is None:
            compiled = _COMPILED[tuple(key)] = self._run_by_triton()
            return compiled
        x, y, z = (*self.grid, 1, 1)[:3]
        stream, function = active.get_current_stream(device), compiled.function
        compiled.run(x, y, z, stream, function, compiled.packed_metadata, None, None, None, *values)
        return compiled

    def _run_by_triton(self) -> Any:
        return self.kernel[self.grid](**self.args, **self.options())

    def compile(self) -> Any:
        """The compiled kernel, specialised by the very path that a launch takes."""
        return self.kernel.warmup(**self.args, grid=self.grid, **self.options())


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""What Triton compiled for a launch, by all that it specialises a kernel by. To find it, Triton
binds arguments by name, writes options out as text and looks at globals: half of what it costs."""
_PARAMETERS: dict[int, list[tuple[str, bool]]] = {}


def parameters_of(kernel: Any) -> list[tuple[str, bool]]:
    """Name of each, and whether it is compiled into the kernel."""
    if id(kernel) not in _PARAMETERS:
        _PARAMETERS[id(kernel)] = [(one.name, one.is_constexpr) for one in kernel.params]
    return _PARAMETERS[id(kernel)]


def _specialised(value: Any) -> Any:
    """What a compiled kernel depends on of an argument: at least what Triton looks at."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if isinstance(value, tuple):
        return tuple(map(_specialised, value))
    return type(value)


def needs_triton() -> bool:
    """Whether Triton itself has to launch: it interprets, a profiler wants to hear of launches from
    it, or the device is one for which it looks at more."""
    if is_interpreting() or torch.version.hip:
        return True
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


# Bytes of shared memory that the settings of sm_90 and of sm_80 are cut for; the latter also run on
# 8.6, 8.9 and 12.0. Compute capabilities with as much as 9.0, where there is no device to read them
# from.
MUCH_SHARED, LITTLE_SHARED = 232_448, 101_376
WITH_MUCH = (90, 100, 103)


@cache
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
        driver = triton.runtime.driver.active
        target = driver.get_current_target()
        if target.backend == "hip":
            return "gfx942"
        return family_of(target.arch, driver.utils.get_device_properties(index)["max_shared_mem"])


def _arch_of_target() -> str:
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    return family_of(target.arch, MUCH_SHARED if target.arch in WITH_MUCH else LITTLE_SHARED)


def family_of(capability: int, max_shared: int) -> str:
    """Whose settings fit an NVIDIA device: by the shared memory of a program, in bytes, since newer
    ones have less (12.0) or as much (10.0), and compile the same products to instructions of their
    own. capability: 90 for 9.0. Raises ``ValueError`` for a device that none fit."""
    if capability < 80:
        raise ValueError(f"compute capability {capability / 10} is too old: 8.0 is the least")
    if max_shared < LITTLE_SHARED:
        raise ValueError(
            f"a program has {max_shared} bytes of shared memory on this device (compute capability "
            f"{capability / 10}): kernels need {LITTLE_SHARED} at least"
        )
    return "sm_90" if capability >= 90 and max_shared >= MUCH_SHARED else "sm_80"
