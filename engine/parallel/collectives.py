"""Operations that all ranks of a group do together.

A *rank* is a worker that computes a part of a model. All ranks call the same operations in the same
order, with tensors of the same shape and type.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """The operations of one rank. Each waits for the other ranks.

    Raises ``RankError`` where another rank has died, has stopped the group or calls another
    operation. A group that has stopped does not continue."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up a tensor of all ranks, in place, and return it.

        x: contiguous; float32, bfloat16 or float16. Parts are added in order of ranks in float32
        and rounded once, so all ranks get the same bits, and so do repeated runs."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, [size, *x.shape], in order of ranks.

        x: contiguous, of any type."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        ...

    def check(self) -> None:
        """Raise ``RankError`` if an operation has failed in launches that were replayed, which
        raise no errors themselves."""
        ...


class Alone:
    """The operations of a group of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def barrier(self) -> None:
        pass

    def check(self) -> None:
        pass
