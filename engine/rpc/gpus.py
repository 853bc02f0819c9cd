"""A GPU for each of several cores on one machine: what they find in their environment."""

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


def environments_of(device: Device, num_cores: int) -> list[Mapping[str, str]]:
    """What the environment of each of several cores has of its own: the GPU that it sees.

    Raises ``ConfigError`` if there are fewer GPUs than cores. Where there are none the cores, which
    resolve the device, say so themselves.
    """
    nothing: list[Mapping[str, str]] = [NO_VALUES] * num_cores
    if device == "cpu" or interprets_cuda() or not may_have_gpu():
        return nothing
    # Only here: a client needs it for nothing else.
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return nothing
    gpus = visible_gpus(num_gpus)
    if len(gpus) < num_cores:
        raise ConfigError(
            f"data_parallel_size is {num_cores}, but this process sees {num_gpus} "
            f"GPU{'s' if num_gpus > 1 else ''} ({', '.join(gpus)}), and each core needs one of its "
            f"own: lower data_parallel_size to at most {num_gpus}, make more visible by "
            f"{VISIBLE_GPUS}, or use device='cpu'"
        )
    return [{VISIBLE_GPUS: gpu} for gpu in gpus[:num_cores]]


def may_have_gpu() -> bool:
    """Whether this machine has the driver of a GPU. Where it has none, torch need not look."""
    try:
        ctypes.CDLL(NVIDIA_DRIVER)
    except OSError:
        return AMD_DRIVER.exists()
    return True
