"""Measures the free memory of the host. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

STATM = Path("/proc/self/statm")
CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Bytes that this process may still allocate: the machine's free memory, or less if a control
    group limits it."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def resident_bytes() -> int:
    """Bytes of the host's memory that this process uses now, with those that it shares."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
