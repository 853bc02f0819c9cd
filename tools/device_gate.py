"""Compiles kernel launches for GPUs that are not here, and checks the results against limits.

Triton's own launch path compiles, with a stand-in for the driver that names the target. This finds
type errors, shapes that a tensor core does not take, spilled registers and tiles that do not fit,
but no races, wrong masks or slowness.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

from kernels.triton.launch import Launch
from tools.compiled import Pipeline, disassembled, pipelines_of, spills_in_loops
from tools.shipped import DTYPES, Shipped


class Device(NamedTuple):
    target: GPUTarget
    max_shared: int  # bytes a program
    dtypes: tuple[str, ...]  # of tools.shipped
    has_warpgroups: bool  # multiplies by warpgroup instructions


PLAIN = ("bf16", "fp16", "fp32")
DEVICES = {
    "sm_90": Device(GPUTarget("cuda", 90, 32), 232_448, tuple(DTYPES), True),
    # 8.6 and 8.9 run it too, and have the least shared memory.
    "sm_80": Device(GPUTarget("cuda", 80, 32), 101_376, PLAIN, False),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), 65_536, ("bf16", "fp16"), False),
}


# Of a processor of sm_90: registers, bytes of shared memory, threads, programs.
REGISTERS, SHARED, THREADS, MOST_PROGRAMS = 65536, 233_472, 2048, 32
SHARED_OF_SYSTEM = 1024  # bytes, of each program
# On a processor, to hide each other's waits: 64 decodes on an H100 were fastest with 4.
ENOUGH_PROGRAMS = 4
FEW_BYTES = 16  # a thread may spill, if no loop reads them


class Resources(NamedTuple):
    """What a compiled kernel takes: registers a thread, bytes spilled, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int
    num_warpgroup_products: int
    num_warp_products: int
    pipelines: tuple[Pipeline, ...] = ()
    spills_in_loops: int = 0  # reads and writes, of loops that multiply

    @property
    def is_ahead(self) -> bool:
        """Whether every loop with a product has copies under way while it computes."""
        return all(pipeline.is_ahead for pipeline in self.pipelines)

    def programs(self, num_warps: int) -> int:
        """Programs that a processor of sm_90 holds at a time."""
        threads = 32 * num_warps
        registers = -(-self.registers // 8) * 8 * threads
        by_memory = SHARED // (self.shared + SHARED_OF_SYSTEM)
        return min(REGISTERS // registers, by_memory, THREADS // threads, MOST_PROGRAMS)


class _NoDriver:
    """The part of a driver that compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextmanager
def compiling_for(device: Device) -> Iterator[None]:
    """Let `Launch.compile` compile for this device within the context."""
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_NoDriver(device.target))
    try:
        yield
    finally:
        driver._active = before


def resources(build: Callable[[], Launch], device: Device) -> tuple[Launch, Resources]:
    """Build a launch and compile it for the device. Errors of Triton are passed on."""
    with compiling_for(device):
        launch = build()
        launch.kernel.device_caches.clear()  # they know devices by number, not by target
        compiled = launch.compile()
        launch.kernel.device_caches.clear()
    is_amd = device.target.backend == "hip"
    return launch, _of_amd(compiled) if is_amd else _of_nvidia(compiled)


def _of_nvidia(compiled: Any) -> Resources:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert found, done.stdout
    ptx = compiled.asm["ptx"]
    products = ptx.count("wgmma.mma_async"), ptx.count("mma.sync")
    sizes = (int(found[1]), int(found[2]), compiled.metadata.shared)
    pipelines = tuple(pipelines_of(compiled.asm["ttgir"]))
    in_loops = spills_in_loops(disassembled(compiled.asm["cubin"])) if any(products) else 0
    return Resources(*sizes, *products, pipelines, in_loops)


def _of_amd(compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        return int(found[1])

    # Scalar registers spill into lanes of vector registers, not into memory.
    spilled, shared = 4 * number("vgpr_spill_count"), compiled.metadata.shared
    sizes = (number("vgpr_count"), spilled, shared, 0, text.count("v_mfma"))
    return Resources(*sizes, spills_in_loops=spilled // 4)  # not known to be in loops


def wants_pipeline(one: Shipped, device: Device) -> bool:
    """Whether the launch must prefetch: float32 is for comparison, other GPUs were never timed."""
    return device.has_warpgroups and one.dtype != "fp32"


class Verdict(NamedTuple):
    """The result of compiling one launch for one device; without `faults` it may ship."""

    name: str
    tile: str
    settings: tuple[int, int]  # warps, stages
    resources: Resources
    faults: list[str]


def judge(one: Shipped, device: Device) -> Verdict:
    launch, got = resources(one.build, device)
    shape = launch.args.get("S")
    rows = getattr(shape, "ROWS", 0)
    found = []
    if got.spilled > FEW_BYTES or got.spills_in_loops:
        found.append(f"spills {got.spilled} bytes, {got.spills_in_loops} times in loops")
    if got.shared > device.max_shared:
        found.append(f"{got.shared} bytes of shared memory, {device.max_shared} are there")
    wants_warpgroups = device.has_warpgroups and rows >= 64 and one.dtype != "fp32"
    if wants_warpgroups and not got.num_warpgroup_products:
        found.append(f"{rows} rows a program, but no warpgroup product")
    programs = got.programs(launch.num_warps)
    if wants_pipeline(one, device) and not got.is_ahead and programs < ENOUGH_PROGRAMS:
        found.append(f"waits for what it loads, with {programs} programs to hide it")
    tile = f"{rows}x{getattr(shape, 'KEYS', 0)}" if rows else "-"
    return Verdict(one.name, tile, (launch.num_warps, launch.num_stages), got, found)
