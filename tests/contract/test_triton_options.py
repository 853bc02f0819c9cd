"""Options that a GPU computes otherwise, compiled: one instruction for few and many rows."""

import os
import re

import pytest

from kernels.triton import invariant
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, Device, compiling_for, judge
from tools.shipped import other_than_attention

INSTRUCTION = re.compile(r"w?g?mma\.\S*(m\d+n\d+k\d+)")


def instructions_of(launch: Launch, device: Device) -> set[str]:
    """Shapes of its products on tensor cores."""
    with compiling_for(device):
        launch.kernel.device_caches.clear()
        compiled = launch.compile()
        launch.kernel.device_caches.clear()
    return set(INSTRUCTION.findall(compiled.asm["ptx"]))


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)
@pytest.mark.parametrize("name", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_few_and_many_rows_are_multiplied_by_one_instruction(name: str) -> None:
    """One row and 4,096, of narrow and wide tiles; ahead of their loads, without a spill."""
    device = DEVICES[name]
    with compiling_for(device):
        launches = [one for one in invariant.configurations() if one.args["x"].itemsize == 2]
    for few, many in zip(launches[:4:2], launches[1:4:2], strict=True):
        assert few.args["T"].rows < many.args["T"].rows
        for launch in (few, many):
            verdict = judge(other_than_attention(launch), device)
            assert not verdict.faults and verdict.resources.is_ahead, verdict
            assert bool(verdict.resources.num_warpgroup_products) == device.has_warpgroups
        one = instructions_of(few, device)
        assert len(one) == 1 and instructions_of(many, device) == one
