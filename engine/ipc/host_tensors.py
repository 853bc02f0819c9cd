"""Tensors of torch in host memory, as ``ipc.tensors`` wants them: bytes, and nothing to map."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from engine.errors import WireError
from engine.ipc.tensors import Described, Exported, Mapped


class HostDevice:
    """``ipc.tensors.Device`` without a device: every transport comes down to ``"default"``.

    Takes tensors of any device of torch; those that arrive are on ``device``.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cpu") if device is None else device

    def describe(self, tensor: torch.Tensor) -> Described:
        name = str(tensor.dtype).removeprefix("torch.")
        return Described(name, list(tensor.shape), tensor.numel() * tensor.element_size())

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_meta:
            what = f"{tensor.layout} on {tensor.device}"
            raise WireError(f"a tensor in {what} cannot travel; make it a dense one with data")
        return tensor.detach().contiguous()

    def to_host(self, tensor: torch.Tensor) -> bytes:
        return bytes_of(tensor).cpu().numpy().tobytes()

    def from_host(self, data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
        if not data:
            return torch.empty(shape, dtype=dtype_of(dtype), device=self._device)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        # torch knows no bool with another byte than 0 or 1.
        typed = own != 0 if dtype == "bool" else own.view(dtype_of(dtype))
        return typed.reshape(shape).to(self._device)

    def allocate(self, num_bytes: int) -> Any:
        _refuse()

    def export(self, memory: Any) -> Exported:
        _refuse()

    def copy_in(self, memory: Any, offset: int, tensor: Any) -> None:
        _refuse()

    def map(self, handle: bytes) -> Mapped:
        _refuse()

    def copy_out(self, mapped: Mapped, offset: int, dtype: str, shape: list[int]) -> Any:
        _refuse()

    def unmap(self, mapped: Mapped) -> None:
        _refuse()

    def synchronize(self) -> None:
        """Copies in host memory are done when their call returns."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, without a copy. [num_bytes]"""
    # Where there is one element or none, any stride counts as contiguous.
    return tensor.as_strided([tensor.numel()], [1]).view(torch.uint8)


def dtype_of(name: str) -> torch.dtype:
    """The type of one of the names in ``ipc.tensors.ITEM_BYTES``."""
    found: torch.dtype = getattr(torch, name)
    return found


def _refuse() -> NoReturn:
    raise OSError("host memory is not lent")
