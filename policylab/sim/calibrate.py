"""Fits a cost profile to step logs, without bias in the total time or in any kind of step.

The total matters because queues amplify an error of the mean near saturation: waiting time grows as
1/(1-load). Deviations from the fit are kept as noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.replay import PlanDifference
from engine.errors import ConfigError
from engine.observe import steplog
from engine.observe.steplog import Header, StepLog
from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import REGIMES, HostCost, Profile, features, regime
from policylab.sim.recorded import LogReader

Floats = NDArray[np.float64]

KNOTS = tuple(2**power for power in range(2, 15))  # tokens: tiles and graphs end there
MIN_IN_SEGMENT = 30  # steps between two knots
MIN_STEPS = 200
WINDOW = 100  # consecutive steps that are kept together
MAX_NOISE = 4096  # ratios kept
OUTLIER = 3.0  # times the expectation: counts in the total, but not in the shape of the fit
SWEEPS = 2000  # of coordinate descent
PASSES = 3


class Sample(NamedTuple):
    """One step of a log."""

    shape: StepShape  # ``seconds`` from plan to result, without the wait for the previous step
    host: float  # seconds from the previous result to its plan; NaN if the engine was idle
    ended: int  # rows of the previous step
    added: int  # requests added between the two
    added_tokens: int  # prompt tokens of those requests


def samples_of(path: str | Path, *, allow_truncated: bool = False) -> list[Sample]:
    """Returns the steps of a log in order. Raises ``ConfigError`` if it cannot be replayed."""
    log = StepLog(path, allow_truncated=allow_truncated)
    reader = _Stopwatch(log.header)
    outcome = reader.run(log)
    if outcome.difference is not None:
        raise ConfigError(f"{path} cannot be replayed with its own policy: {outcome}")
    return reader.samples


class _Stopwatch(LogReader):
    """Replays a step log and records how long each step took."""

    def __init__(self, header: Header) -> None:
        super().__init__(header)
        self.samples: list[Sample] = []
        self._launched: dict[int, tuple[float, float, int, int, int]] = {}  # by step
        self._settled_at = np.nan
        self._ended = 0
        self._added = self._added_tokens = 0
        self._was_idle = True

    def _add(self, adding: steplog.AddCall, added: steplog.AddResult) -> PlanDifference | None:
        self._was_idle |= not (self.num_living or self._flight)
        self._added += 1
        self._added_tokens += len(adding.request.prompt_token_ids)
        return super()._add(adding, added)

    def _repeat(self, record: steplog.Record) -> PlanDifference | None:
        if isinstance(record, steplog.OutputsCall):
            self._was_idle = True
        if isinstance(record, steplog.ResultRecord):
            self._settle(record)
        difference = super()._repeat(record)
        if isinstance(record, steplog.PlanRecord) and self.last_plan.num_tokens:
            self._plan_at(record.times[0])
        return difference

    def _plan_at(self, time: float) -> None:
        host = np.nan if self._was_idle else time - self._settled_at
        before = (self._ended, self._added, self._added_tokens)
        self._launched[self.last_plan.step] = (time, host, *before)
        self._added = self._added_tokens = 0
        self._was_idle = False

    def _settle(self, record: steplog.ResultRecord) -> None:
        plan, time = self._flight[0], record.times[0]
        if plan.num_tokens:
            began, host, *before = self._launched.pop(plan.step)
            since = began if np.isnan(self._settled_at) else max(began, self._settled_at)
            self.samples.append(Sample(StepShape.of(plan, time - since), host, *before))
            self._ended = len(plan.rows)
        self._settled_at = time


@dataclass(frozen=True, kw_only=True)
class PredictionErrors:
    """How a profile's predicted step times compare with measured ones."""

    num_steps: int
    bias: float
    """Sum of the predicted seconds divided by the sum of the measured seconds, minus 1."""
    median: float
    """Median of the absolute relative errors; ``p95`` is their 95 % quantile."""
    p95: float

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> PredictionErrors:
        errors = np.abs(predicted / measured - 1.0)
        return cls(
            num_steps=len(measured),
            bias=float(predicted.sum() / measured.sum() - 1.0),
            median=float(np.median(errors)),
            p95=float(np.quantile(errors, 0.95)),
        )

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps, bias {100 * self.bias:+.1f} %, median error "
            f"{100 * self.median:.1f} %, p95 {100 * self.p95:.1f} %"
        )


def halves(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Divide steps into two halves, one to fit to and one to test on: the even and the odd windows
    of 100 consecutive steps."""
    even = [s for place, s in enumerate(samples) if place // WINDOW % 2 == 0]
    return even, [s for place, s in enumerate(samples) if place // WINDOW % 2]


def calibrate(
    logs: Iterable[Sequence[Sample]], name: str, source: dict[str, Any] | None = None
) -> Profile:
    """Fit a profile to all steps of these logs. Its report has prediction errors, from a fit to one
    half of the steps and a test on the other. Raises ``ConfigError`` for too few steps."""
    logs = [list(log) for log in logs]
    everything = [sample for log in logs for sample in log]
    if len(everything) < MIN_STEPS:
        raise ConfigError(
            f"a profile needs {MIN_STEPS} steps or more, but these logs have {len(everything)}; "
            "serve more requests with --step-log"
        )
    even = [sample for log in logs for sample in halves(log)[0]]
    odd = [sample for log in logs for sample in halves(log)[1]]
    report = {name: vars(judged) for name, judged in judge(fit(even, name), odd or even).items()}
    source = {**(source or {}), "steps": len(everything)}
    return fit(everything, name, source=source, report=report)


def judge(profile: Profile, samples: Sequence[Sample]) -> dict[str, PredictionErrors]:
    """Returns the errors of a profile on these steps, in total and for each kind of step."""
    measured = np.array([sample.shape.seconds for sample in samples])
    predicted = np.array([profile.seconds(sample.shape) for sample in samples])
    regimes = np.array([regime(sample.shape) for sample in samples])
    found = {"all": PredictionErrors.of(predicted, measured)}
    for name in REGIMES:
        if (chosen := regimes == name).any():
            found[name] = PredictionErrors.of(predicted[chosen], measured[chosen])
    return found


def fit(
    samples: Sequence[Sample],
    name: str,
    *,
    source: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
) -> Profile:
    """Fit a profile to steps, such that predicted and measured times have equal sums."""
    shapes = [sample.shape for sample in samples]
    knots = knots_for(np.array([shape.num_tokens for shape in shapes]))
    sizes = np.array([features(shape, knots) for shape in shapes])
    measured = np.array([shape.seconds for shape in shapes])
    coefficients = relative_fit(sizes, measured)
    regimes = np.array([regime(shape) for shape in shapes])
    predicted = sizes @ coefficients
    factors = {
        each: float(measured[chosen].sum() / predicted[chosen].sum())
        for each in REGIMES
        if (chosen := regimes == each).any()
    }
    predicted *= np.array([factors[each] for each in regimes])
    kept, ratios = _ratios(measured, predicted, regimes)
    host, host_noise = _fit_host(samples)
    return Profile(
        name=name,
        is_calibrated=True,
        knots=knots,
        coefficients=coefficients.tolist(),
        factors=factors,
        host=host,
        noise=list(zip(regimes[kept].tolist(), ratios, strict=True)),
        host_noise=host_noise,
        source=source or {},
        report=report or {},
    )


def knots_for(tokens: NDArray[np.int64]) -> list[int]:
    """Choose the numbers of tokens per step at which the cost per token may change, so that each
    range between them has enough steps."""
    knots: list[int] = []
    for knot in KNOTS:
        below = (tokens <= knot) & (tokens > (knots[-1] if knots else 0))
        if below.sum() >= MIN_IN_SEGMENT and (tokens > knot).sum() >= MIN_IN_SEGMENT:
            knots.append(knot)
    return knots


def relative_fit(sizes: Floats, measured: Floats) -> Floats:
    """Fit a non-negative cost to each column of ``sizes`` [steps, columns] by least squares. Errors
    are relative to the predicted time (relative to the measured time they would favour short
    steps), and outliers count as ``OUTLIER`` times the prediction."""
    expected = np.maximum(measured, 1e-9)
    for _ in range(PASSES):
        usual = np.minimum(measured, OUTLIER * expected)
        found = _non_negative(sizes / expected[:, None], usual / expected)
        expected = np.maximum(sizes @ found, 1e-9)
    return found


def _non_negative(sizes: Floats, values: Floats) -> Floats:
    """Non-negative least squares, by coordinate descent on the normal equations."""
    scale = np.sqrt(np.square(sizes).sum(axis=0))
    scale[scale == 0.0] = 1.0
    scaled = sizes / scale
    gram, moment = scaled.T @ scaled, scaled.T @ values
    found = np.zeros(len(scale))
    for _ in range(SWEEPS):
        before = found.copy()
        for place in range(len(found)):
            if gram[place, place]:
                left = moment[place] - gram[place] @ found + gram[place, place] * found[place]
                found[place] = max(0.0, left / gram[place, place])
        if np.abs(found - before).max() <= 1e-10 * max(1e-300, np.abs(found).max()):
            break
    return np.asarray(found / scale, dtype=np.float64)


def _fit_host(samples: Sequence[Sample]) -> tuple[HostCost, list[float]]:
    """Fit the host's time between two steps so that the total is the measured one. Returns the cost
    and the ratios of measured to fitted times."""
    busy = [sample for sample in samples if sample.host > 0.0]
    if len(busy) < MIN_STEPS // 2:
        return HostCost(), []
    sizes = np.array([(1.0, s.ended, s.added, s.added_tokens) for s in busy], dtype=np.float64)
    measured = np.array([sample.host for sample in busy])
    found = relative_fit(sizes, measured)
    found *= measured.sum() / max(1e-12, float((sizes @ found).sum()))
    step, sequence, request, token = found.tolist()
    host = HostCost(step=step, sequence=sequence, request=request, token=token)
    _, ratios = _ratios(measured, sizes @ found, np.zeros(len(measured)))
    return host, ratios


def _ratios(
    measured: Floats, predicted: Floats, kinds: NDArray[Any]
) -> tuple[NDArray[np.intp], list[float]]:
    """Return the indices of the steps to keep as noise, and their ratios of measured to predicted
    time. Keeps at most ``MAX_NOISE`` steps, in windows of consecutive ones. The mean ratio of each
    kind of step, weighted by predicted time, is scaled to 1."""
    kept = np.arange(len(measured))
    if len(kept) > MAX_NOISE:
        windows = np.linspace(0, len(kept) // WINDOW - 1, MAX_NOISE // WINDOW).astype(int)
        kept = np.concatenate([np.arange(w * WINDOW, (w + 1) * WINDOW) for w in windows])
    expected, kinds = np.maximum(predicted[kept], 1e-12), kinds[kept]
    ratios = measured[kept] / expected
    for kind in np.unique(kinds):
        chosen = kinds == kind
        ratios[chosen] /= float(np.average(ratios[chosen], weights=expected[chosen]))
    return kept, [round(float(ratio), 4) for ratio in ratios]
