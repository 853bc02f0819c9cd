"""The products of a placed adapter as the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.layers.interface import Linear
from engine.lora.adapter import AdapterError
from engine.lora.dora import output_changes
from engine.lora.placing import PlacedAdapter, Slice
from kernels.low_rank import LowRankProduct, in_panels


@dataclass(frozen=True, kw_only=True)
class AdapterProducts:
    """An adapter in the host's memory, ready for a slot: the products of each linear layer by the
    name of its target."""

    name: str
    digest: str
    rank: int
    num_bytes: int
    linears: dict[str, tuple[LowRankProduct, ...]]


def products_of(
    placed: PlacedAdapter, layers: Mapping[str, Linear], dtype: torch.dtype
) -> AdapterProducts:
    """Convert an adapter to the dtype of a model's activations. layers: those that take adapters,
    by the names of their targets. Raises ``AdapterError`` for changes that are not supported."""
    converter = _Converter(placed, dtype)
    linears = {}
    for target, slices in placed.linears.items():
        if target not in layers:
            raise converter.unsupported("experts")
        linears[target] = tuple(converter.product(one, layers[target]) for one in slices)
    tensors = {
        one.data_ptr(): one.nbytes
        for products in linears.values()
        for product in products
        for one in product
        if isinstance(one, torch.Tensor)
    }
    return AdapterProducts(
        name=placed.name,
        digest=placed.digest,
        rank=placed.rank,
        num_bytes=sum(tensors.values()),
        linears=linears,
    )


class _Converter:
    def __init__(self, placed: PlacedAdapter, dtype: torch.dtype) -> None:
        self._name = placed.name
        self._dtype = dtype
        self._converted: dict[int, torch.Tensor] = {}  # slices may share their first matrix
        if placed.embedding is not None or placed.replaced:
            raise self.unsupported("embeddings or the whole output layer")

    def product(self, part: Slice, layer: Linear) -> LowRankProduct:
        a = self._converted.get(id(part.a))
        if a is None:
            a = self._converted[id(part.a)] = part.a.to(self._dtype).contiguous()
        factors, added = output_changes(part, layer, self._dtype)
        b = part.b if factors is None else part.b * factors.to(part.b.dtype)[:, None]
        return LowRankProduct(
            part.first,
            len(b),
            a,
            in_panels(b.to(self._dtype)),
            part.scale,
            None if factors is None else factors.contiguous(),
            None if added is None else added.contiguous(),
        )

    def unsupported(self, what: str) -> AdapterError:
        return AdapterError(f"adapter {self._name!r} changes {what}, which is not supported yet")
