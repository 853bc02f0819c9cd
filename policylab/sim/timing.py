"""How long simulated steps take: a cost model's mean, and the unrest of the machine around it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import Profile, regime
from policylab.sim.worker import StepCost

MEAN_RUN = 32  # steps in a row whose noise is taken as it was: slow times last
HOST = "host"


class Timing(Protocol):
    """Seconds of one run's steps, in their order."""

    def seconds(self, shape: StepShape) -> float:
        """The next step, from its plan to its result."""
        ...

    def host_seconds(self, num_seqs: int) -> float:
        """From the result of a step of this many rows to the next plan."""
        ...

    def add_seconds(self, num_prompt: int) -> float:
        """To take a request with a prompt of this many tokens."""
        ...


class Noise:
    """Measured ratios, in runs from places that are drawn (a stationary bootstrap: Politis and
    Romano, 1994), so that slow times last as long as they did.

    Each has a kind, and a step takes the next one of its own: the machine's unrest is a larger
    share of a short step.
    """

    def __init__(self, ratios: Sequence[tuple[str, float]], dice: Random) -> None:
        self._ratios = [ratio for _, ratio in ratios] or [1.0]
        kinds = [kind for kind, _ in ratios] or [""]
        self._next = {kind: _next_places(kinds, kind) for kind in set(kinds)}
        self._any = list(range(len(kinds)))
        self._dice = dice
        self._place = dice.randrange(len(kinds))

    def draw(self, kind: str) -> float:
        """The next one of this kind; of any, if none was measured."""
        if self._dice.random() * MEAN_RUN < 1.0:
            self._place = self._dice.randrange(len(self._ratios))
        found = self._next.get(kind, self._any)[self._place]
        self._place = (found + 1) % len(self._ratios)
        return self._ratios[found]


def _next_places(kinds: Sequence[str], kind: str) -> list[int]:
    """For each place the first at or after it, or from the start on, that has this kind."""
    places, following = [0] * len(kinds), kinds.index(kind)
    for place in reversed(range(len(kinds))):
        following = place if kinds[place] == kind else following
        places[place] = following
    return places


class ProfileTiming:
    """Steps as a profile has them; the same seed draws the same noise."""

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
    """Steps as ``StepCost`` has them, each like the other; the host takes no time."""

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
