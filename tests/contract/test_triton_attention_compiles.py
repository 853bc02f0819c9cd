"""Launches compile for devices that are not here, without spills and within their memory.

Each value of what launches differ in, for one device, and in the campaign pairs of them for all
devices; `python -m tools.compile_gate` goes through all that ship.
"""

import os
from typing import Any

import pytest
from support.pairwise import pairwise

from tools import shipped
from tools.device_gate import DEVICES, judge

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)

FIRST = "sm_90"
ATTENTION = {
    "form": shipped.FORMS,
    "dtype": list(shipped.DTYPES),
    "head_dim": [64, 80, 128, 256],
    "page": [16, 64],
    "switches": [("plain",), *shipped.SWITCHES],
}
WRITES = {
    "dtype": list(shipped.DTYPES),
    "head_dim": [80, 128],
    "norm": shipped.NORMS,
    "rope": shipped.ROPES,
    "num_tokens": [16, 4096],
}


def cases(values: dict[str, Any]) -> list[Any]:
    """Each value once for the first device; pairs of them for all devices are slow."""
    num = max(map(len, values.values()))
    chosen = [{name: each[i % len(each)] for name, each in values.items()} for i in range(num)]
    short = [{**one, "device": FIRST} for one in chosen]
    long = pairwise({**values, "device": list(DEVICES)})
    return [*short, *(pytest.param(case, marks=pytest.mark.slow) for case in long)]


def name_of(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


def check(one: shipped.Shipped, device: str) -> None:
    verdict = judge(one, DEVICES[device])
    assert not verdict.faults, verdict


def at_home(case: dict[str, Any]) -> str:
    """The case's dtype, or bf16 where its device has no kernel for that."""
    has = case["dtype"] in DEVICES[case["device"]].dtypes
    return case["dtype"] if has else "bf16"


@pytest.mark.parametrize("case", cases(ATTENTION), ids=name_of)
def test_attention_compiles(case: dict[str, Any]) -> None:
    switches = frozenset(case["switches"])
    sizes = (case["head_dim"], case["page"], case["form"])
    check(shipped.attention(at_home(case), *sizes, switches), case["device"])


@pytest.mark.parametrize(
    ("form", "page"),
    [
        pytest.param(form, page, marks=[pytest.mark.slow] * (place % 2 != number))
        for number, form in enumerate(shipped.SPLITS)
        for place, page in enumerate((16, 64))
    ],
)
def test_a_processor_holds_two_programs_of_split_keys(form: str, page: int) -> None:
    one = shipped.attention("bf16", 128, page, form, frozenset(("plain",)))
    check(one, "sm_90")
    verdict = judge(one, DEVICES["sm_90"])
    assert verdict.tile == "128x32" and verdict.resources.programs(verdict.settings[0]) == 2


@pytest.mark.parametrize("case", cases(WRITES), ids=name_of)
def test_write_compiles(case: dict[str, Any]) -> None:
    kinds = (case["norm"], case["rope"], case["num_tokens"])
    check(shipped.write(at_home(case), case["head_dim"], *kinds), case["device"])


@pytest.mark.parametrize("num_tokens", [16, 4096])
def test_write_of_a_later_group_compiles(num_tokens: int) -> None:
    """Layers of this group have other sizes than those of the first."""
    check(shipped.write("bf16", 192, "none", "halves", num_tokens, is_later=True), FIRST)


def test_merge_compiles() -> None:
    check(shipped.merge(16, 128), FIRST)
