"""Triton kernels given tensors on the CPU, computed by a GPU: what an interpreter is held to, a
device is held to by the same tests.

Each launch copies the memory its tensors lie in to the device and, computed, home again: views
stay views, and what lies beside them is there to be hurt.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.triton.launch import Launch

DEVICE = "cuda"
_launch = Launch.run


class Loan:
    """Memory of one launch on the device."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def lend(self, value: Any) -> Any:
        """The same view of the memory's copy on the device; whatever else as it is."""
        if isinstance(value, tuple):
            lent = [self.lend(one) for one in value]
            return type(value)(*lent) if hasattr(value, "_fields") else tuple(lent)
        if not isinstance(value, torch.Tensor) or not value.is_cpu:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._lent:
            home = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._lent[storage.data_ptr()] = home, home.to(DEVICE, copy=True)
        there = self._lent[storage.data_ptr()][1].untyped_storage()
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=DEVICE).set_(there, *place)

    def bring_home(self) -> None:
        for home, there in self._lent.values():
            home.copy_(there)


def run(launch: Launch) -> None:
    loan = Loan()
    _launch(launch._replace(args={name: loan.lend(arg) for name, arg in launch.args.items()}))
    loan.bring_home()


def lend_all() -> None:
    """From now on, in the whole process."""
    Launch.run = run
