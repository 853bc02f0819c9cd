"""Profile: the durations of steps of one model on one machine, in a file.

``metronome calibrate`` fits it to step logs. The simulator (``policylab.sim``) samples durations
from it; with the option ``cost_profile`` it is the policies' ``view.cost``.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.sched.adapters import Place
from engine.sched.predict.cost import (
    COPY_SECONDS,
    READ_SECONDS,
    UNLIMITED,
    StepShape,
    seconds_from,
)

FORMAT = 2
FEATURES = ("step", "prompt", "sequence", "decode", "context", "attention")
"""The features of a step: always 1; 1 if it has prompt tokens, else 0; the number of rows; of rows
with one token; of tokens that its rows have in the KV cache; of pairs of a new token and a token
that it attends to. More features follow: the step's new tokens, divided at the knots into those
below the first, between two, and above the last."""

REGIMES = ("decode", "mixed", "prompt")
"""Kinds of steps: only decodes, decodes and prompts, only prompts."""

Vector = NDArray[np.float64]


class HostCost(msgspec.Struct, frozen=True):
    """Seconds that the host needs between two steps, while the device is idle."""

    step: float = 0.0
    sequence: float = 0.0  # per row of the step that has ended
    request: float = 0.0  # per request added meanwhile
    token: float = 0.0  # per prompt token of these requests

    def seconds(self, num_seqs: int, num_added: int = 0, added_tokens: int = 0) -> float:
        """Seconds between a step of ``num_seqs`` rows and the next plan. Meanwhile ``num_added``
        requests with ``added_tokens`` prompt tokens arrive."""
        added = self.request * num_added + self.token * added_tokens
        return self.step + self.sequence * num_seqs + added


class AdapterCost(msgspec.Struct, frozen=True):
    """The cost of loading a LoRA adapter, in seconds."""

    copy: float = COPY_SECONDS
    """From the host's memory into a slot of the device."""
    read: float = READ_SECONDS
    """From a disk into the host's memory, checked."""


class WindowCost(msgspec.Struct, frozen=True):
    """The cost of attention in layers with a sliding window of ``size`` tokens, in seconds."""

    size: int
    context: float
    """Seconds per token in the KV cache that a row reads."""
    attention: float
    """Seconds per pair of a new token and a token in its window."""

    def seconds(self, shape: StepShape) -> float:
        """The cost of a step of this shape in seconds, if all its rows are equally long."""
        read = min(shape.context, self.size * shape.num_seqs)
        pairs = min(shape.attention, self.size * shape.num_tokens)
        return self.context * read + self.attention * pairs


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts the seconds of a step: the sum of its features times their coefficients and of
    ``windows``, times a factor for the kind of step (regime)."""

    format: int = FORMAT
    name: str
    """The model and machine that were measured, or whose data sheet was used."""
    is_calibrated: bool
    knots: list[int]
    """Numbers of tokens at which the price of a further token changes, ascending."""
    coefficients: list[float]
    """Seconds, none below 0: for each of ``FEATURES``, then per token below the first knot, between
    knots, and above the last knot."""
    factors: dict[str, float] = {}
    windows: list[WindowCost] = []
    """Layers with windows, which the coefficients of "context" and "attention" leave out."""
    host: HostCost = HostCost()
    adapters: AdapterCost = AdapterCost()
    noise: list[tuple[str, float]] = []
    """For each of a number of consecutive steps: its regime, and its measured seconds divided by
    the predicted ones. The mean ratio is 1 in each regime. Short steps vary more."""
    host_noise: list[float] = []
    """Measured divided by predicted seconds, for times between two steps (see ``host``)."""
    source: dict[str, Any] = {}
    """Origin: logs, number of steps, processor."""
    report: dict[str, Any] = {}
    """Errors of its predictions for steps that it was not fitted to."""

    def seconds(self, shape: StepShape) -> float:
        """The mean duration of a step of this shape, from its plan to its result."""
        charged = features(shape, self.knots)
        sums = sum(c * x for c, x in zip(self.coefficients, charged, strict=True))
        sums += sum(window.seconds(shape) for window in self.windows)
        return sums * self.factors.get(regime(shape), 1.0)

    def write(self, path: str | Path) -> None:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def __str__(self) -> str:
        return self.name if self.is_calibrated else f"{self.name} (uncalibrated)"


def read_profile(path: str | Path) -> Profile:
    """Read a profile from a file. Raises ``ConfigError``."""
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"cost_profile {str(path)!r} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"cost_profile {str(path)!r} is not a valid profile: {error}; `metronome "
            "calibrate` writes one"
        ) from error
    expected = len(FEATURES) + len(profile.knots) + 1
    if profile.format != FORMAT or len(profile.coefficients) != expected:
        raise ConfigError(
            f"cost_profile {str(path)!r} has format {profile.format} and "
            f"{len(profile.coefficients)} coefficients, must have format {FORMAT} and {expected} "
            f"for its {len(profile.knots)} knots; write it again with `metronome calibrate`"
        )
    return profile


def regime(shape: StepShape) -> str:
    """The kind of a step: "decode", "mixed" or "prompt"."""
    if shape.num_decodes == shape.num_seqs:
        return "decode"
    return "mixed" if shape.num_decodes else "prompt"


def features(shape: StepShape, knots: list[int]) -> list[float]:
    """The numbers by which a profile's coefficients are multiplied to predict this step. knots:
    token counts at which the cost per token changes."""
    tokens = shape.num_tokens
    charged = [
        1.0,
        float(shape.num_decodes < shape.num_seqs),
        float(shape.num_seqs),
        float(shape.num_decodes),
        float(shape.context),
        float(shape.attention),
    ]
    begin = 0
    for knot in knots:
        charged.append(float(max(0, min(tokens, knot) - begin)))
        begin = knot
    charged.append(float(max(0, tokens - begin)))
    return charged


class _Prompt(NamedTuple):
    """Steps with ``num_seqs`` decodes (``context`` cached tokens in all) and one new prompt."""

    num_seqs: int
    context: int

    def shape(self, num_prompt: int) -> StepShape:
        attention = self.context + self.num_seqs + num_prompt * (num_prompt + 1) // 2
        rows = self.num_seqs + (num_prompt > 0)
        return StepShape(
            rows, self.num_seqs + num_prompt, self.num_seqs, self.context, attention, 0.0
        )


class ProfileCost:
    """A profile as a ``CostModel``: it predicts from the first step on, and does not learn."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def step_seconds(
        self, num_seqs: int, num_tokens: int, context: int = 0, attention: int = 0
    ) -> float:
        num_decodes = num_seqs if num_tokens <= num_seqs else max(0, num_seqs - 1)
        shape = StepShape(num_seqs, num_tokens, num_decodes, context, attention, 0.0)
        return self.profile.seconds(shape)

    def prefill_seconds(self, num_tokens: int, context: int = 0) -> float:
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return self.profile.seconds(StepShape(1, num_tokens, 0, context, pairs, 0.0))

    def max_tokens(self, seconds: float, num_seqs: int = 0, context: int = 0) -> int:
        base = _Prompt(num_seqs, context)
        if self.profile.seconds(base.shape(0)) > seconds:
            return 0
        top = 1
        while top < UNLIMITED and self.profile.seconds(base.shape(top)) <= seconds:
            top *= 2
        within = range(top)
        found = bisect_right(within, seconds, key=lambda n: self.profile.seconds(base.shape(n)))
        return min(UNLIMITED, num_seqs + max(0, found - 1))

    def load_seconds(self, place: Place) -> float:
        return seconds_from(place, self.profile.adapters.copy, self.profile.adapters.read)

    def observe(self, shape: StepShape) -> None:
        pass

    def observe_read(self, seconds: float) -> None:
        pass
