"""What a compiled kernel is made of: its loops that multiply, as assembler and Triton wrote them.

Two texts are read. Machine code: a loop is what a backward branch encloses. Triton's own form: what
a loop copies ahead, into how many buffers, and how many copies may be under way when it waits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

WARPGROUP, WARP = "HGMMA", ("HMMA", "IMMA", "QGMMA")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
TARGET = re.compile(r"0x([0-9a-f]+)")
HEAD = re.compile(r"^(\s*)(?:%\S+ = )?scf\.for ")
BUFFERS = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
WAIT = re.compile(r"ttg\.async_wait.*\{num = (\d+)")
DOT = re.compile(r"ttng\.warp_group_dot |tt\.dot ")


class Loop(NamedTuple):
    """One round of the innermost loop around a product, for each warp."""

    instructions: int
    warpgroup_products: int
    warp_products: int
    special: int  # exponentials, logarithms, reciprocals: a quarter of a scheduler's rate
    copies: int  # to shared memory, asynchronous
    spills: int = 0  # reads and writes of registers that lie in memory


class Pipeline(NamedTuple):
    """How a loop with a product fetches what it streams."""

    buffers: list[int]  # of each operand that is copied ahead
    outstanding: list[int]  # copies that may be under way, of each wait

    @property
    def is_ahead(self) -> bool:
        """Whether copies are under way while the loop computes. True where nothing is copied."""
        if not self.outstanding:
            return True
        return min(self.outstanding) > 0 and min(self.buffers, default=0) >= 2


def loops_of(sass: str) -> list[Loop]:
    """The loops of NVIDIA's machine code that multiply on tensor cores, in order."""
    code = [(int(m[1], 16), m[2], m[3]) for m in LINE.finditer(sass)]
    found = []
    for address, name, rest in code:
        target = TARGET.search(rest)
        if name != "BRA" or target is None or int(target[1], 16) >= address:
            continue
        inside = [op for at, op, _ in code if int(target[1], 16) <= at <= address]
        kinds = Counter(op.partition(".")[0] for op in inside)
        num_warp = sum(kinds[kind] for kind in WARP)
        if kinds[WARPGROUP] or num_warp:
            others = kinds["MUFU"], kinds["LDGSTS"], kinds["LDL"] + kinds["STL"]
            found.append(Loop(len(inside), kinds[WARPGROUP], num_warp, *others))
    return found


def hot_loop(loops: list[Loop]) -> Loop | None:
    """The one that does most rounds: without masks it has the fewest instructions."""
    return min(loops, default=None, key=lambda loop: loop.instructions)


def pipelines_of(ttgir: str) -> list[Pipeline]:
    """The pipeline of each loop with a product, in order."""
    found, lines = [], ttgir.splitlines()
    buffers: list[int] = []  # allocated since the last such loop
    place = 0
    while place < len(lines):
        if made := BUFFERS.search(lines[place]):
            buffers.append(int(made[2]))
        head = HEAD.match(lines[place])
        if head is None:
            place += 1
            continue
        end = next(i for i in range(place, len(lines)) if lines[i].startswith(f"{head[1]}}}"))
        body = lines[place:end]
        if any(DOT.search(line) for line in body) and not any(map(HEAD.match, body[1:])):
            waits = [int(wait[1]) for line in body if (wait := WAIT.search(line))]
            found.append(Pipeline(buffers, waits))
            buffers = []
            place = end
        place += 1
    return found


def disassembled(cubin: bytes) -> str:
    """NVIDIA's machine code as text."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command: list[Any] = [tool, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
