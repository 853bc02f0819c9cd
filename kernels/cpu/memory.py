"""Memory for weights, in huge pages where the system has them.

A product of one row reads its weights at the speed of memory. With pages of 4 KiB, it waits for
translations of addresses, which costs 5 to 20 % of that speed."""

from __future__ import annotations

import math
import threading

import torch

from kernels.pages import own_pages

_PAGE = 2 << 20  # bytes of a huge page
_CHUNK = 64 << 20  # bytes that are mapped at a time for small tensors; only used pages take memory
_ALIGNED = 64  # bytes


class _Pool:
    """Places tensors one after the other in mapped memory, which is unmapped with its last
    tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns ``num_bytes`` bytes of memory that are zero."""
        size = -(-num_bytes // _ALIGNED) * _ALIGNED
        with self._lock:
            if size > _CHUNK // 4:
                return _mapped(size)[:num_bytes]
            if size > len(self._rest):
                self._rest = _mapped(_CHUNK)
            taken, self._rest = self._rest[:num_bytes], self._rest[size:]
            return taken


def _mapped(num_bytes: int) -> torch.Tensor:
    """Map memory that begins at a huge page."""
    whole = own_pages(-(-num_bytes // _PAGE) * _PAGE + _PAGE)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + num_bytes]


_POOL = _Pool()


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros for weights that are kept as long as a model."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    return _POOL.take(count * dtype.itemsize).view(dtype).view(shape)
