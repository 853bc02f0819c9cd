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


def environments_of(device: Device, num_cores: int, sizes: str = "") -> list[Mapping[str, str]]:
    """The environment variables that make one GPU visible to each core; none on a machine without
    GPUs.

    sizes: the options that say how many cores there are. Raises ``ConfigError`` if there are fewer
    GPUs than cores.
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
    if len(gpus) < num_cores:
        raise ConfigError(
            f"{sizes or f'there are {num_cores} cores'}, but this process sees {num_gpus} "
            f"GPU{'s' if num_gpus > 1 else ''} ({', '.join(gpus)}), and each core needs one: start "
            f"at most {num_gpus}, make more visible with {VISIBLE_GPUS}, or use device='cpu'"
        )
    return [{VISIBLE_GPUS: gpu} for gpu in gpus[:num_cores]]


def may_have_gpu() -> bool:
    """True if a GPU driver is installed on this machine. Does not import torch."""
    try:
        ctypes.CDLL(NVIDIA_DRIVER)
    except OSError:
        return AMD_DRIVER.exists()
    return True
