"""Compiles every shipped kernel launch for GPUs that are not here: python -m tools.compile_gate

Prints the faults of each launch that must not ship, and a table of registers, shared memory and
spills. The exit status is 1 if there is a fault. A launch takes about a second of one core.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from triton.compiler.errors import CompilationError
from triton.runtime.errors import PTXASError

from tools.device_gate import DEVICES, Device, Resources, Verdict, compiling_for, judge
from tools.shipped import Shipped, shipped

NOTHING = Resources(0, 0, 0, 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, action="append", help="default: all")
    parser.add_argument("--only", default="", help="launches whose name holds this text")
    parser.add_argument("--every", type=int, default=1, help="take every n-th launch")
    parser.add_argument("--verbose", action="store_true", help="a line for every launch")
    options = parser.parse_args()
    is_sound = True
    for name in options.device or DEVICES:
        start = time.perf_counter()
        verdicts = compile_all(DEVICES[name], options)
        print(f"{name}: {len(verdicts)} launches, {time.perf_counter() - start:.0f} s\n")
        print(table(verdicts))
        is_sound &= not any(verdict.faults for verdict in verdicts)
    return 0 if is_sound else 1


def compile_all(device: Device, options: argparse.Namespace) -> list[Verdict]:
    with compiling_for(device):  # how a launch is cut depends on the device
        every = list(numbered(shipped()))
    chosen = [one for one in every if one.dtype in device.dtypes and options.only in one.name]
    verdicts = []
    for one in chosen[:: options.every]:
        try:
            verdict = judge(one, device)
        except (CompilationError, PTXASError) as error:
            verdict = Verdict(one.name, "-", (0, 0), NOTHING, [f"is not compiled: {error!r}"])
        verdicts.append(verdict)
        if verdict.faults or options.verbose:
            print(verdict.name, verdict.tile, verdict.settings, *verdict.resources[:5], end="  ")
            print("; ".join(verdict.faults), flush=True)
    return verdicts


def numbered(launches: Iterable[Shipped]) -> Iterator[Shipped]:
    """Launches, with a number added to each that repeats a name."""
    seen: dict[str, int] = defaultdict(int)
    for one in launches:
        seen[one.name] += 1
        yield one if seen[one.name] == 1 else one._replace(name=f"{one.name}, #{seen[one.name]}")


def table(verdicts: list[Verdict]) -> str:
    """The ranges of resources by kernel and tile, as a Markdown table."""
    kinds = defaultdict(list)
    for verdict in verdicts:
        form, *rest = verdict.name.split(", ")
        kinds[form, rest[0], verdict.tile, verdict.settings].append(verdict.resources)
    lines = ["| launch | tile | warps, stages | registers | shared KiB | spilled | products |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (form, dtype, tile, settings), found in kinds.items():
        shared = max(r.shared for r in found) / 1024
        registers = [r.registers for r in found]
        kind = "warpgroup" if all(r.num_warpgroup_products for r in found) else "warp"
        if not any(r.num_warp_products or r.num_warpgroup_products for r in found):
            kind = "-"
        lines.append(
            f"| {form}, {dtype} | {tile} | {settings[0]}, {settings[1]} "
            f"| {min(registers)}-{max(registers)} | {shared:.1f} "
            f"| {max(r.spilled for r in found)} | {kind} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
