"""Selects the device and checks that it can run the kernels."""

from __future__ import annotations

import torch

from engine.config.decide import Products
from engine.config.engine import Device
from engine.config.env import INTERPRET_CUDA, interprets_cuda
from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ConfigError
from engine.models.assemble import compute_dtype
from engine.worker.platform import Platform
from engine.worker.platform.cuda import CudaPlatform
from engine.worker.platform.host import CpuPlatform, HostPlatform
from kernels.bodies import CPU_TENSORS
from kernels.cpu import isa
from kernels.toolchain import why_triton_cannot_start

LEAST_CAPABILITY = (8, 0)  # compute capability that the kernels need: Ampere


def resolve_device(requested: Device) -> Device:
    """Return "cpu" or "cuda". "auto" selects a GPU if there is one.

    Raises ``ConfigError`` if a GPU is requested and none is available.
    """
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available() and not interprets_cuda():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ConfigError(
            f"device is 'cuda', but torch {torch.__version__} (built {built}) finds no GPU; use "
            "'cpu' or 'auto', or check the driver and CUDA_VISIBLE_DEVICES"
        )
    return "cuda"


def cpu_products(model: ModelConfig, info: ModelInfo, device: Device) -> Products:
    """The kind of CPU matrix products: "tiles", "wide pairs", or "" for the default kernels."""
    if device != "cpu":
        return ""
    dtype = compute_dtype(model, info, device)
    if takes_tiles(dtype):
        return "tiles"
    is_plain = model.quantization is None and dtype is torch.bfloat16
    return "wide pairs" if is_plain and isa.has_wide_pairs() else ""


def takes_tiles(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of this dtype with AMX tiles."""
    return isa.LEVEL == "amx" and dtype is torch.bfloat16


def make_platform(device: Device) -> Platform:
    """Create the platform of the device. If the environment variable ``INTERPRET_CUDA`` is set, the
    CPU takes the place of the GPU and Triton's interpreter runs the kernels.

    Raises ``ConfigError`` if the GPU is too old or Triton cannot start or interpret.
    """
    if device == "cpu":
        CPU_TENSORS.go_to_triton(False)
        return CpuPlatform()
    if not interprets_cuda():
        CPU_TENSORS.go_to_triton(False)
        _check_capability()
        _check_triton()
        return CudaPlatform()
    try:
        CPU_TENSORS.go_to_triton(True)
    except ValueError as error:
        raise ConfigError(f"{INTERPRET_CUDA} is set, but {error}") from error
    return HostPlatform()


def _check_triton() -> None:
    why = why_triton_cannot_start()
    if why is not None:
        raise ConfigError(f"device='cuda' needs Triton. {why}; or use device='cpu'")


def _check_capability() -> None:
    found = torch.cuda.get_device_capability()
    if found < LEAST_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}, the "
            f"kernels need {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} at least; use device='cpu'"
        )
