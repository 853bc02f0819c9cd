"""Selects the instruction set of compiled kernels: that of this processor, or a lower level.

Levels, each including the ones before it:

    base         LLVM's default for this processor
    avx2         vectors of 8 floats
    avx512       vectors of 16 floats
    avx512_bf16  pairs of bfloat16 multiplied and added in one instruction (Zen 4, Cooper Lake)
    amx          tiles of bfloat16 (Sapphire Rapids)

``METRONOME_CPU_ISA`` selects a lower level than the processor's, to test the kernels of other
machines. It must be set before this module is imported; functions that were decorated earlier keep
Numba's own choice. Features are part of the key of the disk cache, so code for another processor or
level is never run.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

from llvmlite import binding
from numba import config
from numba.core.registry import cpu_target

VARIABLE = "METRONOME_CPU_ISA"
KERNEL_CACHE = "METRONOME_KERNEL_CACHE"
"""Environment variable with the directory for compiled kernels."""

_NEEDS: dict[str, tuple[str, ...]] = {
    "base": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx512_bf16": ("avx512bf16",),
    "amx": ("amx-tile", "amx-bf16"),
}
LEVELS = tuple(_NEEDS)
_FAMILIES = {
    "avx2": ("avxvnni", "avxifma", "avxneconvert", "vaes", "vpclmulqdq"),
    "avx512": ("avx512", "avx10"),
    "amx": ("amx",),
}

# System call that requests permission to use the tile registers.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

_HOST: dict[str, bool] = dict(binding.get_host_cpu_features())
_REQUESTED = config.CPU_FEATURES.split(",") if config.CPU_FEATURES else []
if _REQUESTED:  # Numba's own option, which may disable features
    _HOST = {name: on and f"+{name}" in _REQUESTED for name, on in _HOST.items()}


@cache
def may_use_tiles() -> bool:
    """Ask the system to permit AMX in this process and its later threads. Returns False if AMX is
    not available."""
    if not _HOST.get("amx-tile") or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


@cache
def available() -> tuple[str, ...]:
    """The levels that this processor supports, lowest first."""
    found: list[str] = []
    for name, needs in _NEEDS.items():
        if not all(_HOST.get(feature) for feature in needs):
            break
        if name == "amx" and not may_use_tiles():
            break
        found.append(name)
    return tuple(found)


def kernel_cache() -> str | None:
    """Current value of ``METRONOME_KERNEL_CACHE``; ``None`` if it is unset or empty."""
    return os.environ.get(KERNEL_CACHE) or None


def requested() -> str | None:
    """Value of ``METRONOME_CPU_ISA``. Raises ``ValueError`` if this process cannot use that
    level."""
    name = os.environ.get(VARIABLE)
    if name and name not in LEVELS:
        raise ValueError(f"{VARIABLE} is {name!r:.80}, must be one of: {', '.join(LEVELS)}")
    if name and name not in available():
        raise ValueError(
            f"{VARIABLE} is {name!r}, which this processor does not support; it supports: "
            f"{', '.join(available())}. Unset {VARIABLE} to use the highest"
        )
    if name and name != LEVEL:
        raise ValueError(
            f"{VARIABLE} is {name!r}, but this process already uses {LEVEL!r}; set it before the "
            "process starts"
        )
    return name or None


def _choose_level() -> str:
    """Choose the level of this process and disable higher features in Numba.

    An invalid name is ignored here; ``requested`` raises for it when an engine starts.
    """
    level = os.environ.get(VARIABLE, "")
    if len(available()) == 1:
        return available()[-1]
    # Numba creates its compiler when the first function is decorated. Functions that others have
    # decorated by now keep that one; those decorated from here on get one with these features.
    vars(cpu_target).pop("target_context", None)
    # Features in Numba's option are kept, as they may be for another processor.
    kept = set[str]()
    if level not in available():
        level = available()[-1]
        kept = {name.removeprefix("+") for name in _REQUESTED}
    above = LEVELS[LEVELS.index(level) + 1 :]
    without = {name for higher in above for name in _NEEDS[higher]}
    # Disable entire families, because one LLVM feature implies others.
    families = [prefix for level, more in _FAMILIES.items() if level in above for prefix in more]
    without |= {name for name in _HOST if name.startswith(tuple(families))}
    for name in without:
        _HOST[name] = False
    without -= kept
    if not config.CPU_NAME:
        config.CPU_NAME = binding.get_host_cpu_name()
    features = _REQUESTED or [f"{'+' if on else '-'}{name}" for name, on in _HOST.items()]
    features = [*features, *(f"-{name}" for name in sorted(without))]
    if _HOST.get("avx512f"):
        # Otherwise LLVM uses only half of each register when it vectorises loops.
        features.append("-prefer-256-bit")
    config.CPU_FEATURES = ",".join(features)
    return level


LEVEL = _choose_level()


def has(feature: str) -> bool:
    """True if compiled kernels of this process may use an LLVM feature such as "avx512vnni"."""
    return bool(_HOST.get(feature))


def has_wide_pairs() -> bool:
    """True if bfloat16 dot products without tiles are twice as fast as float32 products, as on Zen
    5 (AVX-512 BF16 and AVX-VNNI), but not on Zen 4 or Cooper Lake."""
    return LEVEL == "avx512_bf16" and has("avxvnni")


def widens_float16() -> bool:
    """True if one instruction converts float16 to float32."""
    return has("f16c") or platform.machine() == "aarch64"


def processor() -> str:
    """The processor's model name, for logs and results."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
