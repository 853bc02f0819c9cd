"""Which instructions compiled kernels may use: this processor's by cpuid, or fewer by an option.

Levels, each with the ones before it:

    base         what LLVM takes this processor for; no instruction is named by us
    avx2         vectors of 8 floats
    avx512       vectors of 16 floats
    avx512_bf16  pairs of bfloat16 multiplied and added in one instruction (Zen 4, Cooper Lake)
    amx          tiles of bfloat16 (Sapphire Rapids)

``METRONOME_CPU_ISA`` names a lower level than the processor's, so that the bodies of other machines
can be tried on this one. It must be set before Numba compiles anything, for it settles on its
features once a process. Numba's cache on disk is keyed by them, so a cache that was filled by
another processor, or at another level, is added to and never run.
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
"""A directory for what is compiled, before all others."""

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

# System calls: ask the kernel for the tiles' registers, which a thread's saved state then holds.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

_HOST: dict[str, bool] = dict(binding.get_host_cpu_features())
_REQUESTED = config.CPU_FEATURES.split(",") if config.CPU_FEATURES else []
if _REQUESTED:  # Numba's own option, which may take some away
    _HOST = {name: on and f"+{name}" in _REQUESTED for name, on in _HOST.items()}


@cache
def may_use_tiles() -> bool:
    """Ask the system to let this process and its later threads use AMX; False if it does not."""
    if not _HOST.get("amx-tile") or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


@cache
def available() -> tuple[str, ...]:
    """The levels of this processor, lowest first."""
    found: list[str] = []
    for name, needs in _NEEDS.items():
        if not all(_HOST.get(feature) for feature in needs):
            break
        if name == "amx" and not may_use_tiles():
            break
        found.append(name)
    return tuple(found)


def kernel_cache() -> str | None:
    """What ``METRONOME_KERNEL_CACHE`` says now, ``None`` if it is not set or empty."""
    return os.environ.get(KERNEL_CACHE) or None


def requested() -> str | None:
    """What ``METRONOME_CPU_ISA`` says. Raises ``ValueError`` for what this processor lacks."""
    name = os.environ.get(VARIABLE)
    if name and name not in LEVELS:
        raise ValueError(f"{VARIABLE} is {name!r:.80}, must be one of: {', '.join(LEVELS)}")
    if name and name not in available():
        raise ValueError(
            f"{VARIABLE} is {name!r}, which this processor lacks; it has: "
            f"{', '.join(available())}. Unset it to use all of them"
        )
    if name and name != LEVEL:
        raise ValueError(
            f"{VARIABLE} is {name!r}, but Numba compiled functions before it was read: set it "
            "before the process starts, and import engine before other users of Numba"
        )
    return name or None


def _settle() -> str:
    """The level of this process; what lies above it is taken from Numba.

    A wrong name changes nothing here: ``requested`` raises for it when an engine starts.
    """
    level = os.environ.get(VARIABLE, "")
    # Numba's own name for a context that is made when the first function is declared.
    if "target_context" in vars(cpu_target) or len(available()) == 1:
        return available()[-1]  # too late, or nothing to choose
    # What Numba's option names is compiled with, as for a processor that is elsewhere.
    kept = set[str]()
    if level not in available():
        level = available()[-1]
        kept = {name.removeprefix("+") for name in _REQUESTED}
    above = LEVELS[LEVELS.index(level) + 1 :]
    without = {name for higher in above for name in _NEEDS[higher]}
    # Whole families, with what would bring them back: one feature of LLVM's implies others.
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
        # LLVM would fill half of each register where it makes vectors of loops by itself.
        features.append("-prefer-256-bit")
    config.CPU_FEATURES = ",".join(features)
    return level


LEVEL = _settle()


def has(feature: str) -> bool:
    """Whether compiled kernels of this process may use what LLVM calls so ("avx512vnni")."""
    return bool(_HOST.get(feature))


def has_wide_pairs() -> bool:
    """Whether pairs of bfloat16 are multiplied twice as fast as float32, without tiles. Of the
    processors with AVX-512 BF16 the first (Cooper Lake, Zen 4) take as long for half as many; later
    ones (Zen 5) have AVX-VNNI as well."""
    return LEVEL == "avx512_bf16" and has("avxvnni")


def widens_float16() -> bool:
    """Whether float16 is read in one instruction."""
    return has("f16c") or platform.machine() == "aarch64"


def processor() -> str:
    """The processor's name as the system tells it, for logs and results."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
