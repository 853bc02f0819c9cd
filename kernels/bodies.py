"""The one place that decides which body computes: Triton, Numba or plain torch.

Tensors on a CUDA or ROCm device go to Triton. Tensors on the CPU go to Numba; or to Triton, if its
interpreter is on (``TRITON_INTERPRET=1`` before Triton is imported) after
``CPU_TENSORS.go_to_triton(True)``, which the CUDA worker calls where it stands in for a device.
"""

from __future__ import annotations

from types import ModuleType

import torch


class CpuTensors:
    """Where tensors on the CPU are computed, in the whole process."""

    def __init__(self) -> None:
        self.are_interpreted = False

    def go_to_triton(self, requested: bool) -> None:
        """Raises ``ValueError`` if they cannot, as Triton compiles what it is given."""
        if requested and not _triton().is_interpreting():
            raise ValueError(
                "Triton compiles in this process; set TRITON_INTERPRET=1 before it starts to have "
                "tensors on the CPU interpreted"
            )
        self.are_interpreted = requested


CPU_TENSORS = CpuTensors()


def triton_for(x: torch.Tensor) -> ModuleType | None:
    """The Triton bodies if they compute on this tensor."""
    return _triton() if not x.is_cpu or CPU_TENSORS.are_interpreted else None


def _triton() -> ModuleType:
    # Only here, so that an engine on the CPU never pays for importing Triton.
    from kernels import triton

    return triton
