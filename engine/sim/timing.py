"""How long simulated steps take: a cost model's mean, and the unrest of the machine around it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import Profile
from engine.sim.worker import StepCost

MEAN_RUN = 32  # steps in a row whose noise is taken as it was: slow times last


class Timing(Protocol):
    """Seconds of one run's steps, in their order."""

    def seconds(self, shape: StepShape) -> float:
        """The next step, from its plan to its result."""
        ...

    def host_seconds(self, num_seqs: int) -> float:
        """From the result of a step of so many rows to the next plan."""
        ...

    def add_seconds(self, num_prompt: int) -> float:
        """To take a request with a prompt of so many tokens."""
        ...


class Noise:
    """Measured ratios, in runs from places that are drawn (a stationary bootstrap: Politis and
    Romano, 1994), so that slow times last as long as they did."""

    def __init__(self, ratios: Sequence[float], dice: Random) -> None:
        self._ratios = ratios or (1.0,)
        self._dice = dice
        self._place = dice.randrange(len(self._ratios))

    def draw(self) -> float:
        """The next one."""
        if self._dice.random() * MEAN_RUN < 1.0:
            self._place = self._dice.randrange(len(self._ratios))
        else:
            self._place = (self._place + 1) % len(self._ratios)
        return self._ratios[self._place]


class ProfileTiming:
    """Steps as a profile has them; the same seed draws the same noise."""

    def __init__(self, profile: Profile, seed: int, *, is_noisy: bool = True) -> None:
        self._profile = profile
        dice = Random(seed)
        self._noise = Noise(profile.noise if is_noisy else (), dice)
        self._host_noise = Noise(profile.host_noise if is_noisy else (), Random(dice.random()))

    def seconds(self, shape: StepShape) -> float:
        return self._profile.seconds(shape) * self._noise.draw()

    def host_seconds(self, num_seqs: int) -> float:
        return self._profile.host.seconds(num_seqs) * self._host_noise.draw()

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
