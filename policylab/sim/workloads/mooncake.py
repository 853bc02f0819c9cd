"""Requests like those of Mooncake's traces: long prompts with shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from policylab.sim.job import Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import MOONCAKE_CONV, MOONCAKE_SYNTHETIC, Lengths
from policylab.sim.workloads.open_loop import Body, pairs, uniform
from policylab.sim.workloads.traces import LikeTrace

NUM_OPEN = 512  # open conversations; a new one replaces any of them


@dataclass(frozen=True, kw_only=True)
class Mooncake(LikeTrace):
    """Requests whose prompts often begin with an earlier prompt, as in Mooncake's traces.

    Lengths are drawn from the trace. With probability ``reuse`` a prompt then begins with a whole
    earlier prompt: the longest that fits among ``looks`` random picks of recent prompts."""

    block_size: ClassVar[int] = 512
    looks: ClassVar[int]

    reuse: float
    """The probability that a request extends an earlier prompt, if one that was picked fits."""

    def __post_init__(self) -> None:
        LikeTrace.__post_init__(self)
        self.check("reuse", self.reuse, 0.0, 1.0)

    def bodies(self, dice: RandomDraws) -> Iterator[Body]:
        rng = dice.stream("prefixes")
        goes_on, looks = uniform(rng), uniform(dice.stream("looks"))
        opened: list[
            tuple[int, tuple[Span, ...]]
        ] = []  # tokens of the latest prompt, and the prompt
        for number, (num_prompt, num_output) in enumerate(pairs(self.lengths, dice)):
            place = self._earlier(opened, num_prompt, looks) if next(goes_on) < self.reuse else None
            length, prompt = (0, ()) if place is None else opened[place]
            if num_prompt > length:
                prompt = (*prompt, Span(f"prompt {number}", num_prompt - length))
            if place is None and len(opened) < NUM_OPEN:
                opened.append((num_prompt, prompt))
            else:
                if place is None:
                    place = int(next(looks) * NUM_OPEN)
                opened[place] = (num_prompt, prompt)
            yield Body(prompt, num_output)

    def _earlier(
        self, opened: list[tuple[int, tuple[Span, ...]]], num_prompt: int, looks: Iterator[float]
    ) -> int | None:
        """Pick ``self.looks`` random prompts from ``opened`` (pairs of length and prompt) and
        return the index of the longest one of at most ``num_prompt`` tokens; ``None`` if none
        fits."""
        best, longest = None, 0
        for _ in range(self.looks):
            place = int(next(looks) * len(opened))
            if opened and longest < opened[place][0] <= num_prompt:
                best, longest = place, opened[place][0]
        return best


@dataclass(frozen=True, kw_only=True)
class MooncakeConv(Mooncake):
    """Mooncake's conversation trace: 12,031 requests in 3,537 s; 36.6 % of prompt tokens cached."""

    kind: ClassVar[str] = "mooncake-conv"
    table: ClassVar[Lengths] = MOONCAKE_CONV
    looks: ClassVar[int] = 4
    own_rate: ClassVar[float] = 3.40

    arrivals: str = "poisson"
    reuse: float = 0.755


@dataclass(frozen=True, kw_only=True)
class MooncakeSynthetic(Mooncake):
    """Mooncake's synthetic trace: 3,993 requests in 1,022 s; 64.0 % of prompt tokens cached."""

    kind: ClassVar[str] = "mooncake-synthetic"
    table: ClassVar[Lengths] = MOONCAKE_SYNTHETIC
    looks: ClassVar[int] = 16
    own_rate: ClassVar[float] = 3.91

    arrivals: str = "poisson"
    reuse: float = 0.84
