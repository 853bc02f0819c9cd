"""Output lengths: the history of finished requests, and predictors for unfinished ones."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from collections import deque
from itertools import accumulate
from math import ceil
from random import Random
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.config.dotted import load_dotted
from engine.errors import ConfigError, RequestError
from engine.sched.columns import Columns
from engine.sched.request import Request

logger = logging.getLogger("engine.sched")

MAX_LOGGED_FAILURES = 3


class LengthHistory:
    """The output lengths, in tokens, of the requests that finished last.

    Methods with ``above`` only consider greater lengths, for example those that a request with
    ``above`` output tokens can still reach. They return ``None`` if there is no such length."""

    def __init__(self, window: int = 1000) -> None:
        self._recent: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # sums of the shortest 0, 1, 2, ... lengths; lazy
        self._columns: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, length: int) -> None:
        """Add the output length of a finished request; a full history drops its oldest length."""
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = self._columns = None

    def sample(self, rng: Random, above: int = 0) -> int | None:
        """A random length from those greater than ``above``; ``None`` if there are none."""
        first = bisect_right(self._sorted, above)
        count = len(self._sorted) - first
        return self._sorted[first + rng.randrange(count)] if count else None

    def quantile(self, q: float, above: int = 0) -> int | None:
        """The ``q``-quantile (``q`` 0 to 1) of the lengths greater than ``above``, or ``None``."""
        first = bisect_right(self._sorted, above)
        count = len(self._sorted) - first
        if not count:
            return None
        return self._sorted[first + max(0, ceil(q * count) - 1)]

    def mean(self, above: int = 0) -> float | None:
        """The mean of the lengths greater than ``above``; ``None`` if there are none."""
        first = bisect_right(self._sorted, above)
        count = len(self._sorted) - first
        if not count:
            return None
        if self._sums is None:
            self._sums = list(accumulate(self._sorted, initial=0))
        return (self._sums[-1] - self._sums[first]) / count

    def means(self, above: NDArray[np.int64]) -> NDArray[np.float64]:
        """The mean of the lengths greater than each value in ``above``; NaN where there are
        none."""
        if self._sums is None:
            self._sums = list(accumulate(self._sorted, initial=0))
        if self._columns is None:
            self._columns = np.array(self._sorted, np.int64), np.array(self._sums, np.int64)
        lengths, sums = self._columns
        first = lengths.searchsorted(above, side="right")
        count = len(lengths) - first
        return np.where(count > 0, (sums[-1] - sums[first]) / np.maximum(count, 1), np.nan)


@runtime_checkable
class Predictor(Protocol):
    """Predicts the total number of output tokens of a request.

    A custom class is created with the engine's ``LengthHistory`` as its only argument. ``name``
    is printed with all results obtained with it.
    """

    name: str

    def predict(self, req: Request) -> int:
        """The total number of output tokens, at least 0; a fraction is rounded.

        It is limited to ``req.num_output + 1`` .. ``req.max_total - req.num_prompt``. After an
        error, or for NaN, infinity or no number, the longest possible output is assumed."""
        ...


@runtime_checkable
class PredictsAll(Protocol):
    """A predictor for many requests in one call."""

    def predict_all(self, columns: Columns) -> NDArray[np.int64]:
        """The predicted number of output tokens of each request (see ``Predictor.predict``)."""
        ...


def bounded(req: Request, num_output: float) -> int:
    """Round an estimate and limit it to the output lengths that the request can still have."""
    longest = req.max_total - req.num_prompt
    return min(longest, max(req.num_output + 1, round(num_output)))


class NoPredictor:
    """Predicts the longest output that each request may have."""

    name = "none"

    def __init__(self, lengths: LengthHistory) -> None:
        pass

    def predict(self, req: Request) -> int:
        return req.max_total - req.num_prompt

    def predict_all(self, columns: Columns) -> NDArray[np.int64]:
        return columns.max_total - columns.num_prompt


class HistoryPredictor:
    """Predicts the mean of the finished outputs that are longer than the request's output so far.

    If no output is longer, the longest output that the request may have is predicted."""

    name = "history"

    def __init__(self, lengths: LengthHistory) -> None:
        self.lengths = lengths

    def predict(self, req: Request) -> int:
        mean = self.lengths.mean(above=req.num_output)
        return req.max_total - req.num_prompt if mean is None else bounded(req, mean)

    def predict_all(self, columns: Columns) -> NDArray[np.int64]:
        longest = columns.max_total - columns.num_prompt
        means = self.lengths.means(columns.num_output)
        guess = np.minimum(longest, np.maximum(columns.num_output + 1, np.rint(means)))
        return np.where(np.isnan(means), longest, guess).astype(np.int64)


class OraclePredictor:
    """Predicts exactly: ``hints["output_tokens"]`` has the length of the output.

    For experiments with recorded or generated workloads. Raises ``RequestError`` for a request
    without this hint.
    """

    name = "oracle"

    def __init__(self, lengths: LengthHistory) -> None:
        pass

    def predict(self, req: Request) -> int:
        known = req.hints.get("output_tokens")
        if not isinstance(known, int) or isinstance(known, bool) or known < 1:
            raise RequestError(
                f"hints['output_tokens'] of request {req.request_id!r} is {known!r}, must be a "
                "positive integer for the 'oracle' predictor; set it or choose another predictor",
                param="hints",
            )
        return bounded(req, known)


PREDICTORS: dict[str, type[Predictor]] = {
    "none": NoPredictor,
    "history": HistoryPredictor,
    "oracle": OraclePredictor,
}


class GuardedPredictor:
    """Wraps a plug-in predictor: if it fails, the longest possible output is predicted.

    Predictions are limited to lengths that the request can still reach. The first failures are
    logged. A ``RequestError`` is passed on, since the request lacks an input of the predictor.
    """

    def __init__(self, inner: Predictor) -> None:
        self.inner = inner
        self.name = inner.name
        self.num_failures = 0
        self.first_failure = ""
        self.lowest: float = 0
        """The least prediction so far, or 0. ``policylab.verify`` rejects negative ones."""

    def predict(self, req: Request) -> int:
        try:
            answer = self.inner.predict(req)
            bound = int(bounded(req, answer))
            self.lowest = min(self.lowest, answer)
            return bound
        except RequestError:
            raise
        except Exception as error:  # plug-in code
            self.num_failures += 1
            about = f"length predictor {self.name}, request {req.request_id}"
            failure = f"{about}: {type(error).__name__}: {error}"
            self.first_failure = self.first_failure or failure
            if self.num_failures <= MAX_LOGGED_FAILURES:
                logger.warning("%s; the longest output is assumed", failure)
            return req.max_total - req.num_prompt


def find_predictor(chosen: Any, lengths: LengthHistory) -> Predictor:
    """Create a predictor from its name, dotted path or class; an object is used as it is. Raises
    ``ConfigError`` if it cannot be found or created."""
    found = look_up_predictor(chosen)
    try:
        predictor = found(lengths) if isinstance(found, type) else found
    except Exception as error:  # a plug-in's constructor may raise anything
        raise ConfigError(
            f"length_predictor {chosen!r} cannot be created: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(predictor, Predictor):
        raise ConfigError(f"length_predictor {chosen!r} must have a name and a method predict(req)")
    return predictor if type(predictor) in PREDICTORS.values() else GuardedPredictor(predictor)


def look_up_predictor(chosen: Any) -> Any:
    """Find the class or object of a predictor by name or dotted path. Raises ``ConfigError``."""
    found = chosen
    if isinstance(chosen, str):
        if chosen not in PREDICTORS and "." not in chosen:
            raise ConfigError(
                f"length_predictor {chosen!r} is not known; there are: "
                f"{', '.join(sorted(PREDICTORS))} (or give the dotted path of a class with "
                "predict(req))"
            )
        found = PREDICTORS.get(chosen) or load_dotted(chosen, "length_predictor")
    if not callable(getattr(found, "predict", None)):
        raise ConfigError(f"length_predictor {chosen!r} must have a name and a method predict(req)")
    return found
