"""Processes of this machine as the system describes them: children, open files, command lines."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

from support.live_core import is_running, shared_names, wait_until
from support.patience import SOON_SECONDS

LONG_SECONDS = 0.1  # of a collection


def children(pid: int | None = None) -> set[int]:
    """The child processes of a process, by default of this one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found.update(map(int, task.read_text().split()))
    return found


def tree_of(pid: int) -> list[int]:
    """A process and all that it started."""
    return [pid, *(each for child in sorted(children(pid)) for each in tree_of(child))]


def collect_garbage() -> None:
    """Free what only garbage keeps. After a long collection, as when many tests have left imported
    modules and compiled kernels, later ones do not look at the objects that are there now."""
    start = time.process_time()
    gc.collect()
    if time.process_time() - start > LONG_SECONDS:
        gc.freeze()


def open_files() -> int:
    """The number of files that this process has open, without those that only garbage keeps."""
    collect_garbage()
    return len(os.listdir("/proc/self/fd"))


def command_of(pid: int) -> str:
    """The command line of a process, its words separated by spaces; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def is_spawned(pid: int) -> bool:
    """Whether Python's multiprocessing has started this process to run a function."""
    return "spawn_main" in command_of(pid)


def ranks_of(core: int) -> list[int]:
    """The processes of ranks 1, 2, ... that the process of a core has started."""
    return [pid for pid in tree_of(core)[1:] if is_spawned(pid)]


def state_of(pid: int) -> str:
    """The letter for what a process does, such as R (runs) and S (sleeps)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def nothing_left() -> Iterator[set[int]]:
    """Afterwards, this process has no further child and no further open file, the processes that
    the block has added to the set have ended, and no file in shared memory has a new name."""
    resource_tracker.ensure_running()
    names, before, started = shared_names(), (children(), open_files()), set[int]()
    yield started
    assert wait_until(lambda: not any(map(is_running, started)), SOON_SECONDS) is not None
    assert wait_until(lambda: children() <= before[0], SOON_SECONDS) is not None
    assert open_files() <= before[1]
    assert shared_names() <= names
