"""Describes the machine on which figures are measured."""

import datetime
import os
import platform
from pathlib import Path
from typing import Any

FEATURES = ("avx2", "avx512", "avx10", "avx_", "amx", "fma", "f16c")  # flags that decide kernels


def describe() -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "cpu_family_model": "{}/{}".format(
            _first_value("/proc/cpuinfo", "cpu family"), _first_value("/proc/cpuinfo", "model\t")
        ),
        "features": [
            name
            for name in sorted(_first_value("/proc/cpuinfo", "flags").split())
            if name.startswith(FEATURES)
        ],
        "cores": len(cores),
        "memory_gib": round(int(_first_value("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": _system(),
        "python": platform.python_version(),
    }


def _system() -> str:
    """Like ``platform.platform``, which starts a process to find out."""
    system = os.uname()
    libc = "".join(platform.libc_ver())
    return f"{system.sysname}-{system.release}-{system.machine}-with-{libc}"


def _first_value(path: str, label: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(label):
            return line.partition(":")[2].strip()
    return "unknown"
