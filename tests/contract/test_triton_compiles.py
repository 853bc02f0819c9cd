"""Every kernel beside attention compiles for devices that are not here, without spills.

One of each kernel's shipped launches for sm_90; in the campaign every third kernel's largest for
the others.
"""

import importlib
import os
from pathlib import Path

import pytest

from kernels import triton
from kernels.triton.launch import Launch
from tools.device_gate import DEVICES, Device, compiling_for, resources
from tools.shipped import OTHERS, shipped

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)

MODULES = (
    "norm",
    "layer_norms",
    "activation",
    "sampling",
    "sampling_parts",
    "penalties",
    "bitmask",
    "logprobs",
    "index",
    "low_rank",
    "moe",
    "causal_conv",
    "copies",
    "delta_rule",
    "selective_scan",
    "states",
)
CHUNKED = ("delta_chunks", "scan_chunks")  # compiled slowly, for their many products


def by_kernel(module: str, device: Device) -> list[list[Launch]]:
    """The launches that a module ships, those of each kernel together."""
    found: dict[object, list[Launch]] = {}
    with compiling_for(device):
        for launch in importlib.import_module(f"kernels.triton.{module}").configurations():
            found.setdefault(launch.kernel, []).append(launch)
    return list(found.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "sm_90")) for name in DEVICES]
)
@pytest.mark.parametrize(
    "module", [*MODULES, *(pytest.param(name, marks=pytest.mark.slow) for name in CHUNKED)]
)
def test_kernels_compile(module: str, name: str) -> None:
    device = DEVICES[name]
    order = list(DEVICES).index(name)
    for number, launches in enumerate(
        by_kernel(module, device), (*MODULES, *CHUNKED).index(module)
    ):
        if order and number % 3 != order:
            continue
        launch = launches[-1] if order else launches[number % len(launches)]
        got = resources(lambda one=launch: one, device)[1]
        assert not got.spilled, (launch.kernel, got)
        assert got.shared <= device.max_shared, (launch.kernel, got)


def test_the_gate_compiles_all_launches_that_modules_ship() -> None:
    names = [path.stem for path in Path(triton.__file__).parent.glob("*.py")]
    modules = {name: importlib.import_module(f"kernels.triton.{name}") for name in names}
    assert {name for name in names if hasattr(modules[name], "configurations")} == set(OTHERS)
    with compiling_for(DEVICES["sm_90"]):
        assert len(list(shipped())) > 500
