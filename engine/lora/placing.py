"""Finds where the products of an adapter belong in a decoder, whose layers fuse, reorder and scale
the matrices of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.lora.adapter import Adapter, AdapterError, LowRank, LowRankTable
from engine.lora.turns import give_way
from engine.models.seeing_families import ENCODER_MODULES
from engine.models.spec import DecoderSpec
from engine.models.targets import Shape, TargetPart, targets

EMBED, HEAD = "embed", "head"


class Slice(NamedTuple):
    """What an adapter changes in the outputs [first, first + len(b)) of a linear layer, whose
    weight there becomes W + scale * b @ a, with rows scaled to norms ``magnitude`` if given."""

    first: int
    a: Tensor  # [rank, in]
    b: Tensor  # [outputs, rank]
    scale: float
    bias: Tensor | None = None  # [outputs], added to the outputs
    magnitude: Tensor | None = None  # [outputs]

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(kw_only=True)
class PlacedAdapter:
    """An adapter in the terms of one decoder. Linear layers go by the names of their targets, the
    output layer by "head"."""

    name: str
    digest: str
    rank: int
    num_bytes: int
    linears: dict[str, tuple[Slice, ...]] = field(default_factory=dict)
    embedding: LowRankTable | None = None
    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Whole weights [V, H] in place of the base's: of "embed" and "head"."""


class _Place(NamedTuple):
    """Rows of a matrix in the checkpoint, and where a target has them."""

    target: str
    first: int  # row of the target
    shape: Shape  # of the checkpoint's tensor
    start: int  # row of that tensor, all its leading dimensions flattened
    num_rows: int


class Places:
    """Where a decoder has the tensors of its checkpoint, under all names that they may have."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        self._places: dict[str, list[_Place]] = {}
        for target in targets(spec):
            found: dict[str, list[_Place]] = {}
            for way in target.ways:
                known = set(found)
                for first, part in zip(_firsts(way), way, strict=True):
                    if part.name not in known:
                        start = part.start // part.shape[-1]
                        where = _Place(target.name, first, part.shape, start, part.num_rows)
                        found.setdefault(part.name, []).append(where)
            for name, places in found.items():
                self._places.setdefault(name, []).extend(places)

    def of(self, name: str) -> list[_Place]:
        """Where the rows of a tensor are; [] for a name that the checkpoint cannot have."""
        return self._places.get(name, [])

    def near(self, path: str) -> str:
        """Modules of the base model next to a path that it does not have, for messages."""
        parent = path.rpartition(".")[0]
        modules = [name.removesuffix(".weight") for name in self._places]
        near = [name for name in modules if name.rpartition(".")[0] == parent]
        return ", ".join(near[:4]) or f"modules such as {modules[len(modules) // 2]}"


def _firsts(way: Sequence[TargetPart]) -> list[int]:
    """The first row of each part in the target."""
    return [0, *accumulate(part.num_rows for part in way)][:-1]


def place(adapter: Adapter, places: Places) -> PlacedAdapter:
    """Place an adapter on a decoder. Raises ``AdapterError``, which names the module and both
    shapes, for an adapter of another model and for what cannot be placed."""
    return _Placing(adapter, places).placed()


class _Placing:
    def __init__(self, adapter: Adapter, places: Places) -> None:
        self.adapter, self.places, self.spec = adapter, places, places.spec
        self.slices: dict[str, list[Slice]] = {}

        self._heads = [f"{name}.weight" for name in places.spec.names.heads]

    def placed(self) -> PlacedAdapter:
        adapter = self.adapter
        for path, one in adapter.modules.items():
            give_way()
            self._module(path, one)
        for path, many in adapter.experts.items():
            found, rows = self._found(path, path), many.b.shape[1]
            self._check(path, found[0].shape, (len(many.a), rows, many.a.shape[2]))
            for where in found:
                expert, start = divmod(where.start, rows)
                part = LowRank(many.a[expert], many.b[expert], many.scale)
                self._put(where.target, [where._replace(start=start)], part)
        table = self._table()
        replaced = self._replaced()
        if (HEAD in replaced and HEAD in self.slices) or (EMBED in replaced and table is not None):
            raise self._error("it both adapts and replaces the embedding or the output layer")
        return PlacedAdapter(
            name=adapter.name,
            digest=adapter.digest,
            rank=adapter.rank,
            num_bytes=adapter.num_bytes,
            linears={target: tuple(slices) for target, slices in self.slices.items()},
            embedding=table,
            replaced=replaced,
        )

    def _module(self, path: str, one: LowRank) -> None:
        found = self._found(f"{path}.weight", path)
        self._check(path, found[0].shape, (len(one.b), one.a.shape[1]))
        by_target: dict[str, list[_Place]] = {}
        for where in found:
            by_target.setdefault(where.target, []).append(where)
        for target, mine in by_target.items():
            if target == EMBED and not path.endswith("lm_head"):
                raise self._error(f"its product for {path} is one of a linear module")
            self._put(HEAD if target == EMBED else target, mine, one)

    def _found(self, name: str, path: str) -> list[_Place]:
        if found := self.places.of(name):
            return found
        if ENCODER_MODULES.intersection(path.split(".")):
            raise self._error(
                f"it changes {path}, a module of the encoder of pictures, and adapters can change "
                "only the text half: train it with target_modules that name only modules of the "
                "text half"
            )
        raise self._error(
            f"it changes {path}, which the base model does not have; the base model has "
            f"{self.places.near(path)}"
        )

    def _check(self, path: str, base: Shape, mine: Shape) -> None:
        if len(base) != len(mine):
            raise self._error(f"it changes {path}, which is not a linear module in the base model")
        if base != mine:
            raise self._error(
                f"its product for {path} has the shape {list(mine)}, the base model has "
                f"{list(base)} there"
            )

    def _put(self, target: str, places: Sequence[_Place], one: LowRank) -> None:
        """Add the product of a module to the target that has these of its rows."""
        for first, rows in _ranges(places):
            num_rows = sum(end - start for start, end in rows)
            weights, biases = self._factors(target, first, num_rows)
            b, bias, magnitude = _rows_of(one.b, rows), one.bias, one.magnitude
            if weights is not None:
                b = b * weights.to(b.dtype)[:, None]
            if bias is not None:
                bias = one.scale * _rows_of(bias, rows)
                bias = bias if biases is None else bias * biases.to(bias.dtype)
            if magnitude is not None:
                magnitude = _rows_of(magnitude, rows)
                if weights is not None:
                    magnitude = magnitude * weights.abs().to(magnitude.dtype)
            part = Slice(first, one.a, b, one.scale, bias, magnitude)
            self.slices.setdefault(target, []).append(part)

    def _factors(self, target: str, first: int, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Factors that are multiplied into rows of the target's weight and bias."""
        factors = self.spec.factors.get(target.rpartition(".")[2])
        if factors is None:
            return None, None
        counts = torch.tensor([factor.num_rows for factor in factors])
        weights, biases = (
            torch.tensor(column, dtype=torch.float32).repeat_interleave(counts)
            for column in zip(*(factor[1:] for factor in factors), strict=True)
        )
        return weights[first : first + count], biases[first : first + count]

    def _table(self) -> LowRankTable | None:
        """The change of the embedding, and that of the output layer if the adapter ties both."""
        found = None
        for path, table in self.adapter.tables.items():
            places = self._found(f"{path}.weight", path)
            if places[0].target != EMBED:
                raise self._error(f"its product for {path} is one of an embedding")
            self._check(path, places[0].shape, (table.a.shape[1], len(table.b)))
            found = table
            # Files of peft hold the tied product of the output layer, too.
            if self.adapter.ties_weights and self.spec.tied and HEAD not in self.slices:
                if table.magnitude is not None:
                    raise self._error(
                        f"it ties its product for {path} to the output layer, which is not "
                        "supported with DoRA"
                    )
                both = LowRank(table.b.T.contiguous(), table.a.T.contiguous(), table.scale)
                self._put(HEAD, [_Place(HEAD, 0, places[0].shape, 0, places[0].shape[0])], both)
        return found

    def _replaced(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        size = (self.spec.vocab_size, self.spec.hidden_size)
        for name, whole in self.adapter.replaced.items():
            places = self._found(name, name)
            target = HEAD if name in self._heads else places[0].target
            if target not in (EMBED, HEAD):
                raise self._error(
                    f"it replaces {name} (modules_to_save); only the embedding and the output "
                    "layer can be replaced"
                )
            if tuple(whole.shape) != size:
                raise self._error(
                    f"its {name} has the shape {list(whole.shape)}, the base model's has "
                    f"{list(size)}: vocabularies must have the same size"
                )
            found[target] = whole
        if self.adapter.ties_weights and self.spec.tied and EMBED in found:
            found.setdefault(HEAD, found[EMBED])
        return found

    def _error(self, why: str) -> AdapterError:
        base = self.adapter.base
        trained = f" (it was trained on {base})" if base else ""
        where = f" at {self.adapter.path}" if self.adapter.path else ""
        return AdapterError(f"adapter {self.adapter.name!r}{where}: {why}{trained}")


def _ranges(places: Sequence[_Place]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Adjacent rows of a target: the first, and the ranges of the checkpoint's rows in order."""
    first, end, rows = 0, 0, list[tuple[int, int]]()
    for place in sorted(places, key=lambda place: place.first):
        if rows and place.first != end:
            yield first, rows
            rows = []
        if not rows:
            first = place.first
        rows.append((place.start, place.start + place.num_rows))
        end = place.first + place.num_rows
    yield first, rows


def _rows_of(matrix: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    """Ranges of rows, one after the other; copied if there are several."""
    parts = [matrix[start:end] for start, end in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
