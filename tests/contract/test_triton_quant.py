"""Products with quantised weights in Triton, compiled for devices that are not here."""

import os

import pytest

from kernels.triton import quant
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, compiling_for, judge
from tools.shipped import other_than_attention


def kernels_of(every: int) -> list[Launch]:
    """Each n-th of the launches that ship, the first of every kernel among them."""
    launches = list(quant.configurations())
    firsts = {launch.kernel: launch for launch in reversed(launches)}
    return [*firsts.values(), *launches[every // 2 :: every]]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)
@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("sm_90", 40),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sm_80", 17), ("gfx942", 29))),
    ],
)
def test_launches_compile(name: str, every: int) -> None:
    device = DEVICES[name]
    with compiling_for(device):
        chosen = kernels_of(every)
    for one in map(other_than_attention, chosen):
        if one.dtype in device.dtypes:
            verdict = judge(one, device)
            assert not verdict.faults, verdict
            if verdict.name.startswith("packed_product") and "float32" not in verdict.name:
                # Weights go from registers to the product, the next ones are on their way.
                found = verdict.resources
                assert found.num_warpgroup_products or not device.has_warpgroups, verdict
                assert found.is_ahead, verdict
