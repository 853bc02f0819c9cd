"""Allocates large tensors in memory mappings of their own.

Their memory returns to the system when they are freed; malloc would keep tens of megabytes of it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

OWN_PAGES_BYTES = 1 << 20


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor, in its own memory mapping if it has a megabyte or more."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < OWN_PAGES_BYTES:
        return torch.empty(shape, dtype=dtype)
    return own_pages(num_bytes).view(dtype).view(shape)


def own_pages(num_bytes: int) -> torch.Tensor:
    """Allocate zeros [num_bytes] uint8 in a memory mapping of their own, with huge pages if
    possible. A page takes memory only once it is written."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
