"""How far logits are from those of float32: the engine's, and transformers' in bfloat16."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

from support.watched import WAYS, watch

BAR = 1.1  # how much farther than transformers' bfloat16 the engine may be
ROWS_AT_ONCE = 64
MIN_BYTES_AT_ONCE = 1 << 30  # of exact logits in memory
SHIFT = 16  # of a float32's bits: what is left is sign, exponent and 7 bits of the fraction
NUM_BINS = 1 << (31 - SHIFT)
NUM_DRAWS = 400  # of the bootstrap
Texts = Mapping[str, Sequence[int]]
Logits = Mapping[str, torch.Tensor]  # of each text, [tokens - 1, V]


class Figures(NamedTuple):
    """Figures of one source of logits over all positions."""

    kl: float
    """Mean of KL(float32 || it), nats."""
    mean: float
    """Mean of |logit - float32's|."""
    high: float
    """99.9th percentile of the same."""


@dataclass
class Distance:
    """Distances of some logits from exact ones, gathered piece by piece."""

    kl: dict[str, float] = field(default_factory=dict)  # sums, by text
    off: dict[str, float] = field(default_factory=dict)  # sums of the means over the vocabulary
    count: dict[str, int] = field(default_factory=dict)
    bins: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, logits: torch.Tensor, exact: torch.Tensor) -> None:
        """logits, exact: [N, V] float32, of positions of one text."""
        for at in range(0, len(logits), ROWS_AT_ONCE):
            some, right = logits[at : at + ROWS_AT_ONCE], exact[at : at + ROWS_AT_ONCE]
            off = (some - right).abs()
            if not torch.isfinite(off).all():
                raise ValueError(f"{name}: logits that are no numbers")
            p, q = (x.double().log_softmax(-1) for x in (right, some))
            self.kl[name] = self.kl.get(name, 0.0) + float((p.exp() * (p - q)).sum())
            self.off[name] = self.off.get(name, 0.0) + float(off.double().mean(-1).sum())
            self.count[name] = self.count.get(name, 0) + len(some)
            found = off.flatten().contiguous().view(torch.int32) >> SHIFT
            bins = np.bincount(found.numpy(), minlength=NUM_BINS)
            self.bins[name] = self.bins.get(name, 0) + bins

    @property
    def num_positions(self) -> int:
        return sum(self.count.values())

    def figures(self) -> Figures:
        names = list(self.count)
        return Figures(*self.drawn(names, np.ones((1, len(names)), np.int64))[0].tolist())

    def drawn(self, names: Sequence[str], times: np.ndarray) -> np.ndarray:
        """Figures [draws, 3], each over texts that count so many times [draws, texts]."""
        num = times @ [self.count[name] for name in names]
        bins = np.stack([self.bins[name] for name in names])
        used = np.flatnonzero(bins.any(axis=0))
        highs = [quantile_of_bins(used, row, 0.999) for row in times @ bins[:, used]]
        kl, off = (times @ [sums[name] for name in names] / num for sums in (self.kl, self.off))
        return np.column_stack([kl, off, highs])


def quantile_of_bins(bins: np.ndarray, counts: np.ndarray, share: float) -> float:
    """A quantile of values that are counted in bins. In a bin, at most 0.8 % wide, they are
    taken to be evenly distributed."""
    below = counts.cumsum()
    rank = share * below[-1]
    place = int(np.searchsorted(below, rank))
    edges = (np.array([bins[place], bins[place] + 1], np.int32) << SHIFT).view(np.float32)
    before = below[place] - counts[place]
    within = (rank - before) / max(1, counts[place])
    return float(edges[0] + within * (edges[1] - edges[0]))


class Shown:
    """Logits of a group of texts as the engine shows them, compared when all have come.

    A position that is computed again, after a preemption, counts once, as it was computed last:
    the largest errors belong to a handful of positions, and each would count several times.
    """

    def __init__(
        self, distances: tuple[Distance, Distance], exact: Logits, rounded: Logits
    ) -> None:
        self._ours, self._theirs = distances
        self._exact, self._rounded = exact, rounded
        self._shown: dict[str, torch.Tensor] = {}
        self._positions: dict[str, set[int]] = {}

    def __call__(self, name: str, at: list[int], logits: torch.Tensor) -> None:
        """logits [len(at), V] may be overwritten behind this call."""
        if name not in self._shown:
            self._shown[name] = torch.empty_like(self._exact[name])
        self._shown[name][at] = logits.float()
        self._positions.setdefault(name, set()).update(at)

    def finish(self) -> None:
        for name, positions in self._positions.items():
            at = sorted(positions)
            exact = self._exact[name][at]
            self._ours.add(name, self._shown.pop(name)[at], exact)
            self._theirs.add(name, self._rounded[name][at].float(), exact)


class Ratio(NamedTuple):
    """The engine's distance over that of transformers' bfloat16, in one way of computing."""

    way: str
    num_positions: int
    ours: Figures
    theirs: Figures
    intervals: tuple[tuple[float, float], ...]
    """95 % of each of the ratios, over texts drawn with replacement."""
    num_preemptions: int = 0

    @property
    def values(self) -> Figures:
        ours, theirs = np.array(self.ours), np.array(self.theirs)
        return Figures(*ratios_of(ours, theirs).tolist())


def ratios_of(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """1 where theirs is 0 and ours is not."""
    return np.divide(ours, theirs, out=(ours > 0).astype(float), where=theirs != 0)


def compare(way: str, ours: Distance, theirs: Distance, num_preemptions: int = 0) -> Ratio:
    """The ratio of two distances at the same positions of the same texts."""
    names = sorted(ours.count)
    each = np.full(len(names), 1 / len(names))
    times = np.random.default_rng(1).multinomial(len(names), each, NUM_DRAWS)
    drawn = ratios_of(ours.drawn(names, times), theirs.drawn(names, times))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0).tolist()
    return Ratio(
        way,
        ours.num_positions,
        ours.figures(),
        theirs.figures(),
        tuple(zip(low, high, strict=True)),
        num_preemptions,
    )


def random_texts(seed: int, num: int, size: int, vocab: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"text {i}": rng.choices(range(3, vocab), k=size) for i in range(num)}


def transformers_logits(path: Path, dtype: torch.dtype, texts: Texts) -> Iterator[torch.Tensor]:
    """Logits [tokens - 1, V] of each text; the model computes whole texts in ``dtype``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    for text in texts.values():
        with torch.inference_mode():
            yield model(torch.tensor([text]), use_cache=False).logits[0, :-1].to(dtype)


def groups(texts: Texts, vocab: int) -> Iterator[dict[str, Sequence[int]]]:
    """Texts whose exact logits fit into memory together."""
    group: dict[str, Sequence[int]] = {}
    taken = 0
    for name, text in texts.items():
        group[name] = text
        taken += 4 * vocab * len(text)
        if taken >= MIN_BYTES_AT_ONCE:
            yield group
            group, taken = {}, 0
    if group:
        yield group


def measure(
    path: Path, texts: Texts, vocab: int, ways: Sequence[str] = tuple(WAYS), **options: object
) -> list[Ratio]:
    """The engine with ``options`` beside transformers in bfloat16, on a model directory."""
    distances = {way: (Distance(), Distance()) for way in ways}
    preempted = dict.fromkeys(ways, 0)
    for group in groups(texts, vocab):
        num_threads = torch.get_num_threads()
        exact = dict(zip(group, transformers_logits(path, torch.float32, group), strict=True))
        rounded = dict(zip(group, transformers_logits(path, torch.bfloat16, group), strict=True))
        for way, pair in distances.items():
            shown = Shown(pair, exact, rounded)
            preempted[way] += watch(path, group, WAYS[way], shown, **options).num_preemptions
            shown.finish()
        torch.set_num_threads(num_threads)  # an engine may leave torch one
    return [compare(way, *distances[way], preempted[way]) for way in ways]
