"""Measures the free memory of the host. Imports no torch."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")
CGROUP = Path("/sys/fs/cgroup")
# Limits of a process, and the field of ``STATM`` that counts towards each, in pages.
LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))


def free_host_bytes() -> int:
    """Bytes that this process may still allocate: the machine's free memory, or less if a control
    group or a limit of the process (``ulimit``) is lower."""
    return max(0, min(_free_in_machine(), _free_in_process()))


def resident_bytes() -> int:
    """Bytes of the host's memory that this process uses now, with those that it shares."""
    return _pages()[1] * os.sysconf("SC_PAGE_SIZE")


def _free_in_machine() -> int:
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def _free_in_process() -> int:
    page, used = os.sysconf("SC_PAGE_SIZE"), _pages()
    limits = [(resource.getrlimit(kind)[0], page * used[field]) for kind, field in LIMITS]
    free = [limit - taken for limit, taken in limits if limit != resource.RLIM_INFINITY]
    return min(free, default=sys.maxsize)


def _pages() -> list[int]:
    return [int(number) for number in STATM.read_text().split()]
