"""The products of a placed adapter as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.layers.adapted import AdaptedLayers
from engine.layers.adapted_embedding import AdaptedTable, TableChange
from engine.layers.interface import Linear
from engine.layers.linear import make_linear
from engine.lora.device_slots import Packed
from engine.lora.dora import ROWS, output_changes
from engine.lora.placing import EMBED, HEAD, PlacedAdapter, Slice
from engine.lora.turns import give_way
from kernels.low_rank import LowRankProduct, in_panels, records_of


@dataclass(frozen=True, kw_only=True)
class AdapterProducts:
    """An adapter in the host's memory, ready for a slot: the products of each linear layer by the
    name of its target."""

    name: str
    digest: str
    rank: int
    num_bytes: int
    share: float = 0.0  # of a GPU's memory for adapters
    linears: dict[str, tuple[LowRankProduct, ...]]
    records: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """The tables of ``linears`` that kernels read; the thread that reads the adapter makes them."""
    embedding: TableChange | None = None
    head: Linear | None = None  # in place of the base's output layer
    packed: Packed | None = None  # for a GPU, in place of all others


def products_of(
    placed: PlacedAdapter,
    layers: AdaptedLayers,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> AdapterProducts:
    """Convert an adapter to the dtype of a model's activations. layers: those of the model, which
    are on ``device``; what is returned is in the host's memory."""
    converter = _Converter(dtype, device)
    linears = {}
    for target, slices in placed.linears.items():
        give_way()
        base = layers.linears[target].base
        linears[target] = tuple(converter.product(one, base) for one in slices)
    embedding, head = _table_change(placed, layers.table, dtype), placed.replaced.get(HEAD)
    tensors = {
        one.data_ptr(): one.nbytes
        for part in (*(p for products in linears.values() for p in products), embedding or ())
        for one in part
        if isinstance(one, torch.Tensor)
    }
    if head is not None:
        head = head.to(dtype)
        tensors[head.data_ptr()] = head.nbytes
    return AdapterProducts(
        name=placed.name,
        digest=placed.digest,
        rank=placed.rank,
        num_bytes=sum(tensors.values()),
        linears=linears,
        records={target: records_of(products) for target, products in linears.items()},
        embedding=embedding,
        head=None if head is None else make_linear(head, keeps_float32=True),
    )


def _table_change(
    placed: PlacedAdapter, table: AdaptedTable | None, dtype: torch.dtype
) -> TableChange | None:
    """What an adapter changes in the embedding."""
    if (whole := placed.replaced.get(EMBED)) is not None:
        return TableChange(whole=whole.to(dtype))
    if (one := placed.embedding) is None:
        return None
    a, b = one.a.T.to(dtype).contiguous(), one.b.to(dtype).contiguous()
    if one.magnitude is None:
        return TableChange(a, b, one.scale)
    assert table is not None, "a stage without the embedding has no change of it"
    squares = torch.zeros(len(b))
    for begin in range(0, len(a), ROWS):
        ids = torch.arange(begin, min(begin + ROWS, len(a)))
        changed = TableChange(one.a.T, one.b, one.scale)(ids, table.base(ids))
        squares += changed.square().sum(dim=0)
    return TableChange(a, b, one.scale, one.magnitude.float() / squares.sqrt())


class _Converter:
    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self._dtype, self._device = dtype, device
        self._converted: dict[int, torch.Tensor] = {}  # slices may share their first matrix

    def product(self, part: Slice, layer: Linear) -> LowRankProduct:
        a = self._converted.get(id(part.a))
        if a is None:
            a = self._converted[id(part.a)] = part.a.to(self._dtype).contiguous()
        factors, added = output_changes(part, layer, self._dtype, self._device)
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
