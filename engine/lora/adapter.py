"""What a LoRA adapter is once its files are read: low-rank products by the modules they change.

Names are those of the base model's checkpoint, without what trainers put before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class AdapterError(ConfigError):
    """An adapter that cannot be used: its files are missing or damaged, it needs what is not
    supported, or it was made for another model."""


class LowRank(NamedTuple):
    """The change of a linear module: ``scale * b @ a`` is added to its weight."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float
    bias: Tensor | None = None  # [out], added to the outputs after ``b``, scaled as the product
    magnitude: Tensor | None = None
    """[out]: DoRA. The rows of the changed weight are scaled to these norms."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def tensors(self) -> Iterator[Tensor]:
        """Its tensors, without those that it lacks."""
        yield from (one for one in (self.a, self.b, self.bias, self.magnitude) if one is not None)


class LowRankTable(NamedTuple):
    """The change of an embedding table: ``scale * (b @ a).T`` is added to its weight."""

    a: Tensor  # [rank, tokens]
    b: Tensor  # [width, rank]
    scale: float
    magnitude: Tensor | None = None  # [width]: DoRA, of the table's columns

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def tensors(self) -> Iterator[Tensor]:
        """Its tensors, without those that it lacks."""
        yield from (one for one in (self.a, self.b, self.magnitude) if one is not None)


class LowRankExperts(NamedTuple):
    """The change of one parameter that holds a matrix for each expert."""

    a: Tensor  # [experts, rank, in]
    b: Tensor  # [experts, out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.a, self.b)


@dataclass(kw_only=True)
class Adapter:
    """A LoRA adapter, whose tensors are on the CPU in the types of its file."""

    name: str
    path: str = ""  # "" for an adapter from memory
    digest: str
    """sha256 of all that changes results, in hexadecimal digits."""
    modules: dict[str, LowRank] = field(default_factory=dict)
    """By the path of a linear module: "model.layers.0.self_attn.q_proj"."""
    tables: dict[str, LowRankTable] = field(default_factory=dict)
    """By the path of an embedding: "model.embed_tokens"."""
    experts: dict[str, LowRankExperts] = field(default_factory=dict)
    """By the path of a parameter: "model.layers.0.mlp.experts.gate_up_proj"."""
    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Whole tensors in place of the base's, by their names: "lm_head.weight"."""
    ties_weights: bool = False
    """If the base has one matrix for embedding and output layer, what changes the embedding changes
    the output layer, too."""
    base: str = ""
    """The base model that the adapter was trained on, as its configuration names it; "" if not."""

    @property
    def rank(self) -> int:
        """The largest rank of its products, 0 if it has none."""
        return max((one.rank for one in self.products()), default=0)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def products(self) -> Iterator[LowRank | LowRankTable | LowRankExperts]:
        yield from self.modules.values()
        yield from self.tables.values()
        yield from self.experts.values()

    def tensors(self) -> Iterator[Tensor]:
        for one in self.products():
            yield from one.tensors()
        yield from self.replaced.values()


def is_other_model(base: str, model: str) -> bool:
    """True if two names are those of different models, as far as the last parts of paths and of
    repositories show this. False if one is unknown."""
    names = [
        name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower() for name in (base, model)
    ]
    return all(names) and names[0] != names[1]
