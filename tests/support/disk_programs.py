"""Programs that use the disk tier and are killed.

python disk_programs.py crash PLACE     one process for each call that changes a file, killed
                                        in the middle of it; each has a copy of PLACE/full
python disk_programs.py write PATH SEED MOST_BYTES
                                        writes and reads until it is killed; a line now and then
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.disk_blocks import get, key_of, opened, put

TIGHT = 400_000
"""A bound for 34 segments of 7 blocks."""
OLDEST, FULL = 162, range(486)
"""Files of ``OLDEST`` blocks each fill a directory with that bound."""

Operation = tuple[str, range, int]
"""What is done, to which blocks; the version of blocks that are written."""
OPERATIONS: list[Operation] = [
    ("write", range(600, 605), 0),  # a new segment, for which an old one is removed
    ("forget", range(602, 604), 0),
    ("write", range(602, 610), 1),
    ("forget", range(200, 202), 0),
    ("reopen", range(0), 0),
    ("write", range(200, 201), 1),
    ("clear", range(0), 0),
    ("write", range(700, 702), 1),
    ("reopen", range(0), 0),
]
CALLS = ("pwritev", "pwrite", "ftruncate", "unlink", "fdatasync")


def fill(path: Path) -> None:
    for start in FULL[::OLDEST]:
        store = opened(path)
        put(store, range(start, start + OLDEST))
        get(store, [0, 2, 3])
        store.close()


def operate(path: Path, log: int) -> None:
    store = opened(path, TIGHT)
    for kind, numbers, version in OPERATIONS:
        if kind == "write":
            put(store, numbers, version)
        elif kind == "forget":
            store.forget([key_of(number) for number in numbers])
        elif kind == "clear":
            store.clear()
        else:
            store.close()
            store = opened(path, TIGHT)
        os.write(log, b"+")


def die_in_call(number: int) -> None:
    """Kill this process in the middle of a call."""
    left = [number]

    def deadly(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **names: Any) -> Any:
            if left[0]:
                left[0] -= 1
                return call(*arguments, **names)
            if name.startswith("pwrite"):
                fd, data, offset = arguments
                data = data if name == "pwrite" else b"".join(map(bytes, data))
                os.lseek(fd, offset, os.SEEK_SET)
                os.write(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        return run

    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))


def crash_everywhere(place: Path) -> None:
    for number in range(1000):
        path = place / str(number)
        shutil.copytree(place / "full", path)
        log = os.open(f"{path}.log", os.O_CREAT | os.O_WRONLY, 0o600)
        pid = os.fork()
        if pid == 0:
            die_in_call(number)
            operate(path, log)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        os.close(log)
        if not os.WIFSIGNALED(status):
            assert status == 0
            return


def write_for_ever(path: Path, seed: int, most_bytes: int) -> None:
    draw = random.Random(seed)
    store = opened(path, most_bytes, refresh_seconds=0.02)
    for count in range(1_000_000):
        start = draw.randrange(5000)
        numbers = range(start, start + draw.randrange(1, 12))
        put(store, numbers)
        get(store, range(start - 10, start + 20))
        if count % 50 == 0:
            print(count, store.counts(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "crash":
        crash_everywhere(Path(sys.argv[2]))
    else:
        write_for_ever(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
