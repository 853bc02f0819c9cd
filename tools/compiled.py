"""Reads compiled kernels: spills and pipelines of the loops that multiply matrices.

In machine code a loop is what a backward branch encloses. Triton's GPU dialect shows how many
buffers a loop copies into, and how many copies may be under way when it waits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

PRODUCTS = ("HGMMA", "HMMA", "IMMA", "QGMMA")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
TARGET = re.compile(r"0x([0-9a-f]+)")
HEAD = re.compile(r"^(\s*)(?:%\S+ = )?scf\.for ")
BUFFERS = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")
WAIT = re.compile(r"ttg\.async_wait.*\{num = (\d+)")
DOT = re.compile(r"ttng\.warp_group_dot |tt\.dot ")


class Pipeline(NamedTuple):
    """How a loop with a product fetches what it streams."""

    buffers: list[int]  # number of them, by operand that is prefetched
    outstanding: list[int]  # copies that may be under way, by wait

    @property
    def is_ahead(self) -> bool:
        """Whether copies are under way while the loop computes. True where nothing is copied."""
        if not self.outstanding:
            return True
        return min(self.outstanding) > 0 and min(self.buffers, default=0) >= 2


def spills_in_loops(sass: str) -> int:
    """Reads and writes of spilled registers in the loops that multiply on NVIDIA's tensor cores.

    A loop that lies in another one counts twice.
    """
    code = [(int(m[1], 16), m[2], m[3]) for m in LINE.finditer(sass)]
    num = 0
    for address, name, rest in code:
        target = TARGET.search(rest)
        if name != "BRA" or target is None or int(target[1], 16) >= address:
            continue
        inside = [op for at, op, _ in code if int(target[1], 16) <= at <= address]
        kinds = Counter(op.partition(".")[0] for op in inside)
        if any(kinds[kind] for kind in PRODUCTS):
            num += kinds["LDL"] + kinds["STL"]
    return num


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
