"""An embedding whose vectors are changed by the adapters of a step's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.layers.adapted_linear import StepAdapters


class TableChange(NamedTuple):
    """What an adapter changes in an embedding [V, H]: it adds ``scale * a @ b.T`` and then
    multiplies by ``factors``, or takes the place of the whole."""

    a: torch.Tensor | None = None  # [V, rank]
    b: torch.Tensor | None = None  # [H, rank]
    scale: float = 1.0
    factors: torch.Tensor | None = None  # [H]
    whole: torch.Tensor | None = None  # [V, H]

    def __call__(self, ids: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """The changed vectors of tokens ``ids`` [N] whose vectors are [N, H], in float32."""
        if self.whole is not None:
            return self.whole[ids].float()
        assert self.a is not None and self.b is not None
        changed = torch.addmm(
            vectors.float(), self.a[ids].float(), self.b.float().T, alpha=self.scale
        )
        return changed if self.factors is None else changed * self.factors


class AdaptedTable:
    """Reads vectors of tokens, and changes those of tokens whose adapters change the embedding.

    Steps with such adapters cannot be recorded."""

    def __init__(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """rows: reads vectors of the base, [N] -> a new [N, H]."""
        self.base = rows
        self._step: StepAdapters | None = None
        self._changes: dict[int, TableChange] = {}  # by adapter slot

    def attach(self, step: StepAdapters) -> None:
        """Use the slots in ``step``."""
        self._step = step

    def put(self, slot: int, change: TableChange | None) -> None:
        """Set what the adapter in a slot changes."""
        self._changes.pop(slot, None)
        if change is not None:
            self._changes[slot] = change

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] -> [N, H]."""
        vectors, step = self.base(ids), self._step
        if step is None or not step.is_active or not self._changes:
            return vectors
        for slot, places in step.of(len(ids)).blocks():
            if (change := self._changes.get(slot)) is not None:
                mine = torch.from_numpy(places)
                vectors[mine] = change(ids[mine], vectors[mine]).to(vectors.dtype)
        return vectors
