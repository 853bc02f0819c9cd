"""A kernel launch with all its arguments, which can be run or only compiled."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton


class Launch(NamedTuple):
    """A kernel launch, which can be run on its tensors' device or only compiled for another target.

    fills_registers: let the kernel use all registers. NVIDIA's assembler otherwise spills a few, to
    fit one more program on a processor.
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
        """Launch the kernel. Returns the compiled kernel; ``None`` in Triton's interpreter."""
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
        """Compile the kernel, specialised as in a real launch, without running it."""
        return self.kernel.warmup(**self.args, grid=self.grid, **self.options())


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by everything that specialises them. Triton's own look-up binds arguments by
name, formats options and checks globals, which is half the cost of a launch."""
_PARAMETERS: dict[int, list[tuple[str, bool]]] = {}


def parameters_of(kernel: Any) -> list[tuple[str, bool]]:
    """Name of each parameter of a kernel, and whether it is a compile-time constant."""
    if id(kernel) not in _PARAMETERS:
        _PARAMETERS[id(kernel)] = [(one.name, one.is_constexpr) for one in kernel.params]
    return _PARAMETERS[id(kernel)]


def _specialised(value: Any) -> Any:
    """Returns all properties of an argument by which Triton may specialise a kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if isinstance(value, tuple):
        return tuple(map(_specialised, value))
    return type(value)


def needs_triton() -> bool:
    """True if launches must go through Triton itself instead of our cache of compiled kernels: in
    Triton's interpreter, with a profiler's hooks, and on ROCm."""
    if is_interpreting() or torch.version.hip:
        return True
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


# Bytes of shared memory that the settings of sm_90 and sm_80 need; the latter also run on 8.6, 8.9
# and 12.0. WITH_MUCH: compute capabilities with as much as 9.0, used without a device.
MUCH_SHARED, LITTLE_SHARED = 232_448, 101_376
WITH_MUCH = (90, 100, 103)


@cache
def is_interpreting() -> bool:
    """True if kernels of this process run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def arch_of(x: torch.Tensor) -> str:
    """Returns the architecture (a key of the tables in kernels.tuning) for launches on this tensor.
    In the interpreter it is sm_90; for a CPU or meta tensor, that of the driver's target."""
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
    """Returns the architecture whose tuned settings an NVIDIA device uses: sm_90 if capability and
    shared memory are at least those of 9.0, else sm_80. capability: 90 for 9.0; max_shared: bytes
    of shared memory per program. Raises ``ValueError`` if the device is too old or has too little
    shared memory."""
    if capability < 80:
        raise ValueError(
            f"compute capability {capability / 10} is not supported; 8.0 is the minimum"
        )
    if max_shared < LITTLE_SHARED:
        raise ValueError(
            f"this device (compute capability {capability / 10}) has {max_shared} bytes of shared "
            f"memory per program; kernels need at least {LITTLE_SHARED}"
        )
    return "sm_90" if capability >= 90 and max_shared >= MUCH_SHARED else "sm_80"
