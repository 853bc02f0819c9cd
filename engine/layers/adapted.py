"""The layers of a decoder that take adapters."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.layers.adapted_embedding import AdaptedTable
from engine.layers.adapted_linear import AdaptedLinear, ExpertRows, OutputRows, StepAdapters

OUTPUT = "head"  # name of the output layer, also if it is tied to the embedding


@dataclass
class AdaptedLayers:
    """The layers of a decoder that take adapters; all are empty if it takes none."""

    linears: dict[str, AdaptedLinear] = field(default_factory=dict)
    """By the names of their targets."""
    experts: dict[str, ExpertRows] = field(default_factory=dict)
    """By the index of the layer: what is before the first dot of the targets of its experts."""
    table: AdaptedTable | None = None  # the embedding

    def attach(self, num_slots: int, step: StepAdapters, most_tokens: int) -> None:
        """Make room for this many adapters, and use the slots in ``step``."""
        for experts in self.experts.values():
            experts.attach(step, most_tokens)
        for name, linear in self.linears.items():
            rows = OutputRows(step) if name == OUTPUT else self.experts_of(name)
            linear.attach(num_slots, rows or step)
        if self.table is not None:
            self.table.attach(step)

    def experts_of(self, name: str) -> ExpertRows | None:
        """The experts that a linear layer is part of; ``None`` if it is of no expert."""
        layer, _, rest = name.partition(".")
        return self.experts[layer] if "." in rest else None
