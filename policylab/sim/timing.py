"""Durations of simulated steps: the prediction of a cost model, with measured noise."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import Profile, regime
from policylab.sim.worker import StepCost

MEAN_RUN = 32  # mean number of consecutive ratios that are replayed in order
HOST = "host"


class Timing(Protocol):
    """The durations of a run's steps; called once per step, in order."""

    def seconds(self, shape: StepShape) -> float:
        """Seconds from planning a step of this shape to having its result."""
        ...

    def host_seconds(self, num_seqs: int) -> float:
        """Host seconds between the result of a step with this many requests and the next plan."""
        ...

    def add_seconds(self, num_prompt: int) -> float:
        """Seconds of host work to add a request with a prompt of this many tokens."""
        ...


class Noise:
    """Random factors for step times: measured over predicted time, as recorded in a profile.

    Recorded factors are replayed in their order, from random starting points (stationary bootstrap:
    Politis and Romano, 1994), so slow periods last as long as measured. Each kind of step uses the
    factors measured for that kind."""

    def __init__(self, ratios: Sequence[tuple[str, float]], dice: Random) -> None:
        self._ratios = [ratio for _, ratio in ratios] or [1.0]
        kinds = [kind for kind, _ in ratios] or [""]
        self._next = {kind: _next_places(kinds, kind) for kind in set(kinds)}
        self._any = list(range(len(kinds)))
        self._dice = dice
        self._place = dice.randrange(len(kinds))

    def draw(self, kind: str) -> float:
        """Draw a random factor for a step's time, of its kind if that was measured."""
        if self._dice.random() * MEAN_RUN < 1.0:
            self._place = self._dice.randrange(len(self._ratios))
        found = self._next.get(kind, self._any)[self._place]
        self._place = (found + 1) % len(self._ratios)
        return self._ratios[found]


def _next_places(kinds: Sequence[str], kind: str) -> list[int]:
    """For each index, the next index (cyclic, itself included) with ``kinds[index] == kind``."""
    places, following = [0] * len(kinds), kinds.index(kind)
    for place in reversed(range(len(kinds))):
        following = place if kinds[place] == kind else following
        places[place] = following
    return places


class ProfileTiming:
    """Durations from a measured profile, with random noise."""

    def __init__(self, profile: Profile, seed: int, *, is_noisy: bool = True) -> None:
        self._profile = profile
        dice = Random(seed)
        self._noise = Noise(profile.noise if is_noisy else (), dice)
        host_noise = [(HOST, ratio) for ratio in profile.host_noise] if is_noisy else ()
        self._host_noise = Noise(host_noise, Random(dice.random()))

    def seconds(self, shape: StepShape) -> float:
        return self._profile.seconds(shape) * self._noise.draw(regime(shape))

    def host_seconds(self, num_seqs: int) -> float:
        return self._profile.host.seconds(num_seqs) * self._host_noise.draw(HOST)

    def add_seconds(self, num_prompt: int) -> float:
        host = self._profile.host
        return host.request + host.token * num_prompt


class FixedTiming:
    """Durations from ``StepCost``, without noise or host time."""

    def __init__(self, cost: StepCost) -> None:
        self.seconds = cost.seconds
        self.seconds_each = cost.seconds_each

    def host_seconds(self, num_seqs: int) -> float:
        return 0.0

    def add_seconds(self, num_prompt: int) -> float:
        return 0.0


def timing(cost: StepCost | Profile, seed: int) -> Timing:
    """The durations of one run."""
    return ProfileTiming(cost, seed) if isinstance(cost, Profile) else FixedTiming(cost)
