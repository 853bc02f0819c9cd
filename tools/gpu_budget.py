"""What each shipped launch may take on sm_90, by version of Triton: 3 % more fails the gate.

A file of what was compiled when it was last looked at. What a change makes of a kernel's registers,
instructions and shared memory is seen so before a device sees it; a change for the better, or one
that is worth its cost, is written down with `python -m tools.compile_gate --write-budget`.
"""

from __future__ import annotations

import json
from pathlib import Path

import triton

from tools.device_gate import Verdict

PLACE = Path(__file__).with_name("gpu_budget.json")
DEVICE = "sm_90"
FIELDS = (
    "registers", "spilled", "shared", "programs of a processor", "instructions of a round",
    "products", "special functions",
)  # fmt: skip
SLACK = 1.03
Budget = dict[str, list[int]]


def taken(verdict: Verdict) -> list[int]:
    """What a launch takes, in the order of ``FIELDS``."""
    got, loop = verdict.resources, verdict.resources.loop
    of_loop = [0, 0, 0]
    if loop is not None:
        products = loop.warpgroup_products + loop.warp_products
        of_loop = [loop.instructions, products, loop.special]
    programs = got.programs(verdict.settings[0])
    return [got.registers, got.spilled, got.shared, programs, *of_loop]


def budget() -> Budget:
    """The budget for this version of Triton; empty if none was written for it."""
    found: Budget = json.loads(PLACE.read_text()).get(triton.__version__, {})
    return found


def over_budget(verdict: Verdict, allowed: Budget) -> list[str]:
    """What the launch takes too much of; nothing for one that is not in the budget."""
    if verdict.name not in allowed:
        return []
    found = []
    for field, now, before in zip(FIELDS, taken(verdict), allowed[verdict.name], strict=True):
        is_less_better = not field.startswith("programs")
        worse = now > before * SLACK if is_less_better else now < before
        if worse:
            found.append(f"{field}: {now}, {before} in the budget")
    return found


def write(verdicts: list[Verdict]) -> None:
    """Enter these launches; others of this version stay."""
    whole = json.loads(PLACE.read_text()) if PLACE.exists() else {}
    own = whole.setdefault(triton.__version__, {})
    own.update({verdict.name: taken(verdict) for verdict in verdicts})
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        + "\n }"
        for version, rows in sorted(whole.items())
    ]
    PLACE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
