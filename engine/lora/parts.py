"""The part of an adapter that belongs to a rank's part of a decoder."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.lora.adapter import AdapterError
from engine.lora.placing import EMBED, HEAD, PlacedAdapter, Slice
from engine.models.sharding import DecoderSlice
from engine.models.targets import Cut


def part_of(placed: PlacedAdapter, mine: DecoderSlice) -> PlacedAdapter:
    """The part of an adapter for one rank. Of a layer whose outputs are divided it has rows of the
    second matrix; of one whose inputs are divided, columns of the first, since the products are
    added up over the ranks. Changes of the embedding are whole. A stage of a pipeline has the
    layers that it computes.

    Raises ``AdapterError`` for DoRA where a rank has no whole rows, whose norms it needs."""
    placed = _of_stage(placed, mine)
    if mine.shard.size == 1:
        return placed
    linears: dict[str, tuple[Slice, ...]] = {}
    for target, slices in placed.linears.items():
        cut = mine.cut(target)
        if cut.columns is not None and any(one.magnitude is not None for one in slices):
            raise _without_norms(placed, target, mine)
        parts = (_part(one, cut, is_first=mine.shard.rank == 0) for one in slices)
        linears[target] = tuple(part for part in parts if part is not None)
    if placed.embedding is not None and placed.embedding.magnitude is not None:
        raise _without_norms(placed, EMBED, mine)
    replaced = dict(placed.replaced)
    if HEAD in replaced:
        tokens = mine.vocabulary
        replaced[HEAD] = replaced[HEAD][tokens.start : tokens.stop]
    return replace(placed, linears=linears, replaced=replaced)


def _of_stage(placed: PlacedAdapter, mine: DecoderSlice) -> PlacedAdapter:
    """What an adapter changes in the layers of a stage."""
    stage = mine.stage
    has = {EMBED: stage.is_first, HEAD: stage.is_last}
    return replace(
        placed,
        linears={
            target: slices
            for target, slices in placed.linears.items()
            if stage.has(mine.whole, target)
        },
        embedding=placed.embedding if stage.is_first else None,
        replaced={name: whole for name, whole in placed.replaced.items() if has[name]},
    )


def _part(one: Slice, cut: Cut, *, is_first: bool) -> Slice | None:
    """The part of a slice; ``None`` if this rank has none of its outputs."""
    if cut.columns is not None:
        a = one.a[:, cut.columns.start : cut.columns.stop].contiguous()
        return one._replace(a=a, bias=one.bias if is_first else None)
    if cut.rows is None:
        return one
    # A slice is adjacent rows of the whole, so what is left of it is adjacent rows of the part.
    rows, first, before = list[range](), 0, 0
    for part in cut.rows:
        begin, end = max(part.start, one.first), min(part.stop, one.first + len(one.b))
        if begin < end:
            first = first if rows else before + begin - part.start
            rows.append(range(begin - one.first, end - one.first))
        before += len(part)
    if not rows:
        return None

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[part.start : part.stop] for part in rows])

    return one._replace(
        first=first,
        b=of(one.b),
        bias=None if one.bias is None else of(one.bias),
        magnitude=None if one.magnitude is None else of(one.magnitude),
    )


def _without_norms(placed: PlacedAdapter, target: str, mine: DecoderSlice) -> AdapterError:
    return AdapterError(
        f"adapter {placed.name!r} scales the rows of {target} (DoRA), of which each of the "
        f"{mine.shard.size} ranks has a part: serve it with tensor_parallel_size=1, or merge it "
        "into the model"
    )
