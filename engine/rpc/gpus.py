"""Assigns a GPU to each of several cores on one machine, by environment variables."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from engine.config.engine import Device
from engine.config.env import VISIBLE_GPUS, interprets_cuda, visible_gpus
from engine.errors import ConfigError
from engine.ipc.process import NO_VALUES

NVIDIA_DRIVER = "libcuda.so.1"
AMD_DRIVER = Path("/dev/kfd")


def environments_of(
    device: Device, num_cores: int, sizes: str = "", num_ranks: int = 1
) -> list[Mapping[str, str]]:
    """The environment variables that make ``num_ranks`` GPUs visible to each core; none on a
    machine without GPUs.

    sizes: the options that say how many cores there are. Raises ``ConfigError`` if there are too
    few GPUs.
    """
    nothing: list[Mapping[str, str]] = [NO_VALUES] * num_cores
    if device == "cpu" or interprets_cuda() or not may_have_gpu():
        return nothing
    # Imported here, since clients need it for nothing else.
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return nothing
    gpus = visible_gpus(num_gpus)
    if len(gpus) < num_cores * num_ranks:
        needed = "one" if num_ranks == 1 else f"{num_ranks} (one for each rank)"
        raise ConfigError(
            f"{sizes or f'there are {num_cores} cores'}, but this process sees {num_gpus} "
            f"GPU{'s' if num_gpus > 1 else ''} ({', '.join(gpus)}), and each core needs {needed}: "
            f"start at most {num_gpus // num_ranks}, make more visible with {VISIBLE_GPUS}, or "
            "use device='cpu'"
        )
    firsts = range(0, num_cores * num_ranks, num_ranks)
    return [{VISIBLE_GPUS: ",".join(gpus[first : first + num_ranks])} for first in firsts]


def may_have_gpu() -> bool:
    """True if a GPU driver is installed on this machine. Does not import torch."""
    try:
        ctypes.CDLL(NVIDIA_DRIVER)
    except OSError:
        return AMD_DRIVER.exists()
    return True
