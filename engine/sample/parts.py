"""What a sampler reads: logits of the whole vocabulary, or of the part that a rank has.

In a group, each rank edits the logits of its part and draws the best of its tokens. Noise is keyed
by token, so the best of all parts' winners is the token that would be drawn from the whole
vocabulary. Only scores and tokens are gathered, except in steps in which a row truncates or wants
log-probabilities or a logits processor: they need all logits. Which these are is decided by the
requests alone, and so equally by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import RankError
from engine.layers.parallel import PartOfOutput, joined
from engine.parallel.collectives import Collectives
from kernels import slots as on_slots
from kernels.cpu.native import hold
from kernels.slots import Rows, SamplingColumns

if TYPE_CHECKING:
    from engine.sample.edits import SamplingSpec

WORD = 32  # tokens in one word of a mask
GATHERED = "gathered"  # the way of steps for which all logits are gathered
GPU_CHECKS = 100  # checks on a GPU of which one compares the noise of the ranks
T = TypeVar("T", bound=np.signedinteger)


class Masks(NamedTuple):
    """Bit masks of the allowed tokens of all or some rows, on the device."""

    words: torch.Tensor  # [M, ceil(V / 32)] int32
    of_row: torch.Tensor  # [R] int32, mask index of each row; -1: none


class Vocabulary:
    """The whole vocabulary of ``size`` tokens. ``width``: number of logits of a row."""

    ways: tuple[str, ...] = ("",)
    """How ``draw`` may compute tokens. What is recorded of one way cannot replace another."""
    part_logits: Callable[..., torch.Tensor] | None = None
    """Computes the logits that the sampler reads, if they are not those of the model."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.width = size

    def spec(self, spec: SamplingSpec) -> SamplingSpec:
        """Edits of the tokens whose logits are here, by their columns."""
        return spec

    def places(self, tokens: NDArray[T]) -> NDArray[T]:
        """Columns of tokens; -1 for those that are elsewhere."""
        return tokens

    def here(self, tokens: NDArray[T]) -> NDArray[T]:
        """Columns of those tokens whose logits are here."""
        return tokens

    def device_places(self, tokens: torch.Tensor) -> torch.Tensor:
        """``places`` on the device."""
        return tokens

    def words(self, words: torch.Tensor) -> torch.Tensor:
        """The bits of mask words [M, ceil(V / 32)] for the logits that are here."""
        return words

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of rows of which the sampler has ``logits``."""
        return logits

    def put(self, row: torch.Tensor, whole: torch.Tensor) -> None:
        """Store what has changed in ``whole(row[None])[0]`` in the row."""

    def are_sound(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """For each of ``rows`` [E]: whether no logit is NaN or +inf and not all are -inf."""
        return on_slots.are_sound(logits, rows)

    def way(self, *, truncates: bool) -> str:
        """The way for a step; truncates: a row may limit its candidates by top-k, top-p or
        min-p."""
        return ""

    def draw(
        self, rows: Rows, columns: SamplingColumns, masks: Masks | None, way: str
    ) -> torch.Tensor:
        """Sample a token for each row, [R] int32; -1 for a row without a token."""
        if masks is None:
            return on_slots.sample(rows, columns)
        return on_slots.sample_allowed(rows, columns, *masks)

    def check(self) -> None:
        """Raise ``RankError`` if the ranks of a group have not drawn from the same noise."""


class PartOfVocabulary(Vocabulary):
    """The part of the vocabulary that a rank has."""

    ways = ("", GATHERED)

    def __init__(
        self, parts: Sequence[range], ranks: Collectives, differs: torch.Tensor | None = None
    ) -> None:
        """parts: the tokens of each rank, adjacent; differs: a zero [1] int64 on the device, which
        becomes 1 once ranks have drawn from other noise."""
        super().__init__(parts[-1].stop)
        self.parts = parts
        self.ranks = ranks
        self.mine = parts[ranks.rank]
        self.width = len(self.mine)
        self._differs = torch.zeros(1, dtype=torch.int64) if differs is None else differs
        self._num_checks = 0

    def spec(self, spec: SamplingSpec) -> SamplingSpec:
        first, edits = (
            self.mine.start,
            zip(spec.edit_ids, spec.edit_values, spec.edit_until, strict=True),
        )
        kept = [(token - first, *more) for token, *more in edits if token in self.mine]
        ids, values, until = map(list, zip(*kept, strict=True)) if kept else ([], [], [])
        allowed = spec.allowed
        if allowed is not None:
            allowed = [token - first for token in allowed if token in self.mine]
        # A word's last token is a column; the others are compared with the output.
        words = [[*word[:-1], word[-1] - first] for word in spec.words if word[-1] in self.mine]
        return replace(
            spec,
            allowed=allowed,
            edit_ids=ids,
            edit_values=values,
            edit_until=until,
            words=words,
        )

    def places(self, tokens: NDArray[T]) -> NDArray[T]:
        is_here = (tokens >= self.mine.start) & (tokens < self.mine.stop)
        return np.where(is_here, tokens - self.mine.start, -1).astype(tokens.dtype)

    def here(self, tokens: NDArray[T]) -> NDArray[T]:
        places = self.places(tokens)
        return places[places >= 0]

    def device_places(self, tokens: torch.Tensor) -> torch.Tensor:
        is_here = (tokens >= self.mine.start) & (tokens < self.mine.stop)
        return torch.where(is_here, tokens - self.mine.start, -1)

    def words(self, words: torch.Tensor) -> torch.Tensor:
        first, bit = divmod(self.mine.start, WORD)
        num = -(-self.width // WORD)
        here = words[:, first : first + num + 1].long() & 0xFFFFFFFF
        if bit:
            here >>= bit
            here[:, :-1] |= words[:, first + 1 : first + here.shape[1]].long() << (WORD - bit)
        return here[:, :num].int()

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return joined(logits, self.parts, self.ranks)

    def put(self, row: torch.Tensor, whole: torch.Tensor) -> None:
        row.copy_(whole[self.mine.start : self.mine.stop])

    def are_sound(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        peaks = self.ranks.all_gather(logits[rows].amax(dim=1))  # NaN is larger than all numbers
        return peaks.amax(dim=0).isfinite()

    def way(self, *, truncates: bool) -> str:
        return GATHERED if truncates else ""

    def draw(
        self, rows: Rows, columns: SamplingColumns, masks: Masks | None, way: str
    ) -> torch.Tensor:
        if way == GATHERED:
            whole = rows._replace(logits=self.whole(rows.logits))
            hold(whole)
            return super().draw(whole, columns, masks, way)
        mine = () if masks is None else (self.words(masks.words), masks.of_row)
        best = on_slots.sample_part(rows, columns, self.mine.start, *mine)
        found = self.ranks.all_gather(best)
        hold(best, found)
        return on_slots.best_of_parts(found, self._differs)

    def check(self) -> None:
        # The host waits for a GPU to read from it.
        self._num_checks += 1
        if not self._differs.is_cpu and self._num_checks % GPU_CHECKS:
            return
        if self._differs[0]:
            raise RankError(
                f"rank {self.ranks.rank} has drawn a token with the noise of another seed or "
                "position than other ranks: their tables of requests differ"
            )


def vocabulary_of(
    model: object, size: int, zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
) -> Vocabulary:
    """What the sampler of a model with ``size`` tokens reads. zeros: allocates on the device."""
    output = getattr(model, "output", None)
    if not isinstance(output, PartOfOutput):
        return Vocabulary(size)
    part = PartOfVocabulary(output.parts, output.ranks, zeros((1,), torch.int64))
    part.part_logits = output.part
    return part
