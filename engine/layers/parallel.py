"""Layers of which each rank of a group has a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

import kernels
from engine.layers.batch import Wanted
from engine.layers.interface import Linear
from engine.layers.sublayers import OutputLayer
from engine.parallel.collectives import Collectives
from kernels import slots as on_slots
from kernels.cpu.matmul.outputs import Scores
from kernels.cpu.native import hold
from kernels.meta import ColumnGroups


class SummedLinear:
    """A linear layer whose outputs are added up over the ranks, each of which has some inputs."""

    def __init__(self, part: Linear, ranks: Collectives) -> None:
        self.part = part
        self.ranks = ranks
        self.in_features, self.out_features = part.in_features, part.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, inputs of this rank] -> [N, out]."""
        return self.ranks.all_reduce(self.part(x))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [N] of this rank's part of the weight."""
        return self.part.rows(ids)


class Summed:
    """A sublayer of which each rank computes a part, and whose outputs are added up."""

    def __init__(self, part: Callable[..., torch.Tensor], ranks: Collectives) -> None:
        self.part = part
        self.ranks = ranks

    def __call__(self, *args: Any) -> torch.Tensor:
        """The output of the whole sublayer [N, H], for the arguments of the part."""
        return self.ranks.all_reduce(self.part(*args))


class PartOfTable:
    """Reads vectors of tokens from a table of which each rank has some rows."""

    def __init__(
        self, rows: Callable[[torch.Tensor], torch.Tensor], mine: range, ranks: Collectives
    ) -> None:
        """rows: reads rows of this rank's part; mine: the tokens of these rows."""
        self.part = rows
        self.mine = mine
        self.ranks = ranks

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] -> [N, H]."""
        vectors = self.part(kernels.own_rows(ids, self.mine))
        return self.ranks.all_reduce(kernels.clear_others(vectors, ids, self.mine))


def joined(mine: torch.Tensor, parts: Sequence[range], ranks: Collectives) -> torch.Tensor:
    """The columns [N, all] of all ranks, of which this rank has ``mine`` [N, columns]; parts: the
    columns of each rank."""
    widest = max(map(len, parts))
    if mine.shape[1] < widest:
        mine = kernels.join_columns([mine, mine[:, : widest - mine.shape[1]]])
    gathered = ranks.all_gather(mine.contiguous())
    hold(mine, gathered)
    return kernels.join_columns(
        [one[:, : len(part)] for one, part in zip(gathered, parts, strict=True)]
    )


class PartOfOutput(OutputLayer):
    """An output layer of which each rank has the logits of some tokens."""

    def __init__(
        self,
        linear: Linear,
        multiplier: float,
        softcap: float,
        *,
        parts: list[range],
        ranks: Collectives,
    ) -> None:
        """linear: of this rank's tokens; parts: the tokens of each rank."""
        super().__init__(linear, multiplier, softcap)
        self.parts = parts
        self.ranks = ranks
        self._differs = torch.zeros(1, dtype=torch.int64)  # there is no noise

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See ``OutputLayer``; of equal logits the lowest token."""
        if not self.has_largest:
            return None
        mine = hidden.new_empty((len(hidden), 3), dtype=torch.float64)
        largest: Callable[..., torch.Tensor | None] = getattr(self.linear, "largest")  # noqa: B009
        if largest(hidden, Scores(mine, self.parts[self.ranks.rank].start)) is None:
            return None
        return on_slots.best_of_parts(self.ranks.all_gather(mine), self._differs)

    def part(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> logits [R, tokens of this rank] float32, written to ``out`` if given."""
        return super().__call__(hidden, out)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> logits [R, V] float32 of all ranks, written to ``out`` if given."""
        logits = joined(self.part(hidden), self.parts, self.ranks)
        return logits if out is None else out.copy_(logits)


class NormOfAllHeads:
    """A projection to queries, keys and values, followed by RMS norms of queries and of keys over
    the heads of all ranks."""

    def __init__(
        self,
        part: Linear,
        weights: tuple[torch.Tensor, torch.Tensor],
        counts: tuple[int, int],
        eps: float,
        ranks: Collectives,
    ) -> None:
        """part: the projection to the heads of this rank; weights: of queries and keys, of this
        rank; counts: columns of the queries and of the keys of all ranks together."""
        self.part = part
        self.eps = eps
        self.ranks = ranks
        self.in_features, self.out_features = part.in_features, part.out_features
        q, k = (len(weight) for weight in weights)
        device = weights[0].device
        self.groups = ColumnGroups.of([(0, q, 0), (q, q + k, 1)], counts, device)
        rest = torch.ones(part.out_features - q - k, device=device)
        self.weight = torch.cat([*(weight.float() for weight in weights), rest])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> queries, keys and values [N, out]."""
        y = self.part(x)
        sums = self.ranks.all_reduce(kernels.sums_of_squares(y, self.groups))
        return kernels.scale_groups(y, sums, self.weight, self.groups, self.eps)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` [N] of this rank's part of the weight."""
        return self.part.rows(ids)


class GateOfAllHeads:
    """The gate on the output of a recurrence and its RMS norm, over groups of columns that several
    ranks share; see ``OutputGate``."""

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        group: int,
        *,
        first: int,
        norm_first: bool,
        num_groups: int,
        ranks: Collectives,
    ) -> None:
        """weight: of this rank's columns [C]; group: columns of a group; first: this rank's first
        column; num_groups: of all ranks."""
        self.weight = weight.float()
        self.eps = eps
        self.norm_first = norm_first
        self.ranks = ranks
        borders = sorted({0, len(weight), *range(-first % group, len(weight), group)})
        runs = [(at, to, (first + at) // group) for at, to in pairwise(borders)]
        self.groups = ColumnGroups.of(runs, [group] * num_groups, weight.device)

    def __call__(
        self, y: torch.Tensor, gate: torch.Tensor, wanted: Wanted | None = None
    ) -> torch.Tensor:
        """Gate and normalise y: [N, C] -> [N, C], or [R, C] for the R tokens in ``wanted``."""
        if wanted is not None:
            y, gate = y[wanted.rows], gate[wanted.rows]
        if self.norm_first:
            return self._opened(self._normed(kernels.join_columns([y])), gate)
        return self._normed(self._opened(y, gate))

    def _opened(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y * silu(gate), a new tensor."""
        return kernels.grouped_gated_norm(y, gate, None, self.eps, group=y.shape[1])

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, in place."""
        sums = self.ranks.all_reduce(kernels.sums_of_squares(x, self.groups))
        return kernels.scale_groups(x, sums, self.weight, self.groups, self.eps)
