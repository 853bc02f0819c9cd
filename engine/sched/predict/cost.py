"""Cost models: predict how long a step takes. ``LinearCost`` learns from measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import StepPlan
from engine.sched.adapters import Place

Vector = NDArray[np.float64]

UNLIMITED = 2**31 - 1
FEW = 24  # up to this many rows a loop is faster than numpy


class CostModel(Protocol):
    """Predicts the seconds of a step from its sizes: ``num_seqs`` rows and ``num_tokens`` new
    tokens.

    ``context``: tokens in the KV cache before the step, summed over its rows. ``attention``: number
    of pairs of a new token and a token that it attends to.
    """

    def step_seconds(
        self, num_seqs: int, num_tokens: int, context: int = 0, attention: int = 0
    ) -> float:
        """Seconds of a step with these sizes."""
        ...

    def prefill_seconds(self, num_tokens: int, context: int = 0) -> float:
        """Seconds of a step with ``num_tokens`` tokens of one prompt, after ``context`` cached
        tokens."""
        ...

    def max_tokens(self, seconds: float, num_seqs: int = 0, context: int = 0) -> int:
        """The most tokens that a step with ``num_seqs`` decodes (``context`` cached tokens in all)
        and the first tokens of one prompt can compute within ``seconds``, decodes included; 0 if
        they alone take longer."""
        ...

    def load_seconds(self, place: Place) -> float:
        """Predicted seconds until requests can run with an adapter that is in this place: 0 for
        `slot`; for `host` to copy it, for `disk` to read and to copy it."""
        ...

    def observe(self, shape: StepShape) -> None:
        """Learn from a measured step."""
        ...

    def observe_read(self, seconds: float) -> None:
        """Learn how long it took to read an adapter into the host's memory."""
        ...


PRIOR = np.array([5e-3, 4e-6, 2e-5, 1e-8, 1e-9])
"""The coefficients before any step was measured: seconds per step, per row, per token, per token of
context and per attention pair. After the first measured step only their proportions matter."""

COPY_SECONDS = 2e-3  # to copy an adapter from the host's memory into a slot
READ_SECONDS = 50e-3  # to read an adapter from a disk, before any was read
MANY_READS = 16  # the latest reads count most: as in a mean over this many


class LinearCost:
    """A cost model linear in the sizes of a step: a base time, and a price for each size.

    Every ``every`` steps the prices are fitted to about the last ``memory`` measured steps, by
    non-negative least squares with a weak pull towards the proportions of ``PRIOR``.
    """

    def __init__(self, *, memory: int = 2000, every: int = 16) -> None:
        self.coefficients: tuple[float, ...] = tuple(PRIOR.tolist())  # in the order of PRIOR
        self.num_observed = 0
        self._keep = 1.0 - 1.0 / memory
        self._every = every
        self._new: list[StepShape] = []
        # Features are in units of what the prior charges for them, so all weigh alike.
        self._gram = np.zeros((5, 5))
        self._moment = np.zeros(5)
        self._square = 0.0  # sum of squares of the measured times, in the same units
        self._kept = np.arange(5)  # features whose factors are above 0
        self._read_seconds = READ_SECONDS
        self._num_reads = 0

    def step_seconds(
        self, num_seqs: int, num_tokens: int, context: int = 0, attention: int = 0
    ) -> float:
        fixed, row, token, cached, pair = self.coefficients
        return fixed + row * num_seqs + token * num_tokens + cached * context + pair * attention

    def prefill_seconds(self, num_tokens: int, context: int = 0) -> float:
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return self.step_seconds(1, num_tokens, context, pairs)

    def prefill_seconds_each(
        self, num_tokens: NDArray[np.int64], context: NDArray[np.int64]
    ) -> Vector:
        """``prefill_seconds`` of many prompts, each computed in a separate step."""
        fixed, row, token, cached, pair = self.coefficients
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        seconds: Vector = fixed + row + token * num_tokens + cached * context + pair * pairs
        return seconds

    def max_tokens(self, seconds: float, num_seqs: int = 0, context: int = 0) -> int:
        left = seconds - self.step_seconds(num_seqs, num_seqs, context, context + num_seqs)
        if left < 0:
            return 0
        _, _, token, _, pair = self.coefficients
        # solves left = token * n + pair * n * (n + 1) / 2 for n without cancellation
        linear = token + pair / 2
        divisor = linear + sqrt(linear * linear + 2 * pair * left)
        num_prompt = 2 * left / divisor if divisor else UNLIMITED
        return num_seqs + int(min(UNLIMITED, num_prompt))

    def load_seconds(self, place: Place) -> float:
        return seconds_from(place, COPY_SECONDS, self._read_seconds)

    def observe_read(self, seconds: float) -> None:
        self._num_reads = min(MANY_READS, self._num_reads + 1)
        self._read_seconds += (seconds - self._read_seconds) / self._num_reads

    def combine(self, weights: Sequence[float]) -> tuple[float, float]:
        """Return the sum of the coefficients, each times its weight (in the order of ``PRIOR``),
        and the standard error of this sum, both in seconds."""
        value = sum(w * c for w, c in zip(weights, self.coefficients, strict=True))
        kept, total = self._kept, self._gram.sum()
        if total <= len(kept):
            return value, inf
        factors = np.array(self.coefficients) / PRIOR
        left = self._square - 2 * factors @ self._moment + factors @ self._gram @ factors
        scale = max(0.0, left) / (total - len(kept))
        priced = (np.array(weights) * PRIOR)[kept]
        gram = (self._gram + self._pull() * np.eye(5))[np.ix_(kept, kept)]
        return value, sqrt(scale * float(priced @ np.linalg.solve(gram, priced)))

    def observe(self, shape: StepShape) -> None:
        if not shape.seconds or not shape.num_seqs:
            return
        self._new.append(shape)
        self.num_observed += 1
        if self.num_observed in (1, 4) or len(self._new) == self._every:
            self._refit()

    # -- helpers

    def _refit(self) -> None:
        """Fit the prices again to the measured steps; new steps have the most weight."""
        sizes = np.array(
            [(1, s.num_seqs, s.num_tokens, s.context, s.attention) for s in self._new], np.float64
        )
        seconds = np.array([shape.seconds for shape in self._new])
        self._new.clear()
        if self.num_observed > 4 * self._every:  # clip outliers
            seconds = np.minimum(seconds, 4 * (sizes @ np.array(self.coefficients)))
        priced = sizes * PRIOR
        expected = priced.sum(axis=1)
        # Errors are relative to the prior's prediction: relative to the measured time they
        # would favour short steps, and predictions would be too small.
        priced /= expected[:, None]
        self._gram *= self._keep ** len(seconds)
        self._moment *= self._keep ** len(seconds)
        self._square *= self._keep ** len(seconds)
        self._gram += priced.T @ priced
        self._moment += priced.T @ (seconds / expected)
        self._square += float(np.square(seconds / expected).sum())
        self.coefficients = tuple((PRIOR * self._solve()).tolist())

    def _pull(self) -> float:
        """Return the strength of the regularisation that pulls all factors towards their mean."""
        return 1e-3 * float(self._gram.sum()) / 5

    def _solve(self) -> Vector:
        """Fit the factors, at least 0, by which to multiply the coefficients of ``PRIOR``."""
        total = self._gram.sum()  # the features of a step sum to 1, so this counts the steps
        level = self._moment.sum() / total
        pull = self._pull()
        gram = self._gram + pull * np.eye(5)
        moment = self._moment + pull * level
        kept = np.arange(5)
        while True:  # drop the most negative factor and solve again, at most four times
            factors = np.zeros(5)
            factors[kept] = np.linalg.solve(gram[np.ix_(kept, kept)], moment[kept])
            if factors.min() >= 0:
                self._kept = kept
                return factors
            kept = np.delete(kept, factors[kept].argmin())


def seconds_from(place: Place, copy: float, read: float) -> float:
    """Seconds to load an adapter that is in this place. ``copy``: into a slot, ``read``: into the
    host's memory."""
    return 0.0 if place == "slot" else copy if place == "host" else read + copy


class StepShape(NamedTuple):
    """The sizes of one step (in tokens unless noted) and its duration."""

    num_seqs: int
    num_tokens: int
    num_decodes: int  # number of rows with one token
    context: int  # tokens in the KV cache before the step, summed over the rows
    attention: int  # sum over the rows of pairs (new token, earlier token)
    seconds: float  # from launch to result; 0.0 if not measured

    @classmethod
    def of(cls, plan: StepPlan, seconds: float) -> StepShape:
        """The shape of the step that a plan describes; ``seconds``: its measured duration."""
        if plan.num_tokens == len(plan.counts):  # decodes only
            count, context = plan.num_tokens, int(np.add.reduce(plan.starts, dtype=np.int64))
            return cls(count, count, count, context, context + count, seconds)
        if len(plan.counts) <= FEW:
            return cls._of_few(plan, seconds)
        starts, counts = plan.starts.astype(np.int64), plan.counts.astype(np.int64)
        return cls(
            num_seqs=len(counts),
            num_tokens=plan.num_tokens,
            num_decodes=int((counts == 1).sum()),
            context=int(starts.sum()),
            attention=int((counts * starts + counts * (counts + 1) // 2).sum()),
            seconds=seconds,
        )

    @classmethod
    def _of_few(cls, plan: StepPlan, seconds: float) -> StepShape:
        """Return ``of(plan, seconds)``, computed in a loop: faster than numpy for few rows."""
        rows = list(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True))
        return cls(
            num_seqs=len(rows),
            num_tokens=plan.num_tokens,
            num_decodes=sum(count == 1 for _, count in rows),
            context=sum(start for start, _ in rows),
            attention=sum(count * start + count * (count + 1) // 2 for start, count in rows),
            seconds=seconds,
        )


NO_STEP = StepShape(0, 0, 0, 0, 0, 0.0)
