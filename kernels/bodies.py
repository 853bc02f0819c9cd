"""Selects the implementation ("body") of an operation: Triton, Numba or plain torch.

Tensors on a CUDA or ROCm device use Triton. Tensors on the CPU use Numba, or, after
``CPU_TENSORS.go_to_triton(True)``, Triton's interpreter (``TRITON_INTERPRET=1`` must be set before
Triton is imported), so that tests can run the GPU's code on a CPU.
"""

from __future__ import annotations

from types import ModuleType

import torch


class CpuTensors:
    """Which implementation computes CPU tensors in this process."""

    def __init__(self) -> None:
        self.are_interpreted = False

    def go_to_triton(self, requested: bool) -> None:
        """Let Triton's interpreter compute CPU tensors, or stop that. Raises ``ValueError`` if this
        process has no interpreter."""
        if requested and not _triton().is_interpreting():
            raise ValueError(
                "Triton's interpreter is off in this process; set TRITON_INTERPRET=1 before the "
                "process starts"
            )
        self.are_interpreted = requested


CPU_TENSORS = CpuTensors()


def triton_for(x: torch.Tensor) -> ModuleType | None:
    """The module of Triton implementations if Triton computes this tensor, otherwise ``None``."""
    return _triton() if not x.is_cpu or CPU_TENSORS.are_interpreted else None


def _triton() -> ModuleType:
    # Imported here, so that an engine on the CPU does not import Triton.
    from kernels import triton

    return triton
