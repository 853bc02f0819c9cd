"""Independent requests of all sizes alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from random import Random
from typing import ClassVar

from engine.errors import ConfigError
from engine.sim.job import Job, Span
from engine.sim.workloads.source import Source, Workload

NUM_PREFIXES = 8


@dataclass(frozen=True, kw_only=True)
class LogUniform(Workload):
    """Poisson arrivals; lengths log-uniform from the shortest to the longest."""

    kind: ClassVar[str] = "log-uniform"

    prompt_tokens: tuple[int, int] = (16, 1024)
    """Shortest and longest prompt, without a shared beginning."""
    output_tokens: tuple[int, int] = (8, 512)
    """Shortest and longest output."""
    shared_prefix: int = 0
    """Tokens that half of the prompts have in front of them, one of eight texts."""
    num_users: int = 4
    """Requests belong to one of these, each as likely."""

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        self.check("num_users", self.num_users, 1)
        self.check("shared_prefix", self.shared_prefix, 0)
        for name in ("prompt_tokens", "output_tokens"):
            shortest, longest = getattr(self, name)
            if not 1 <= shortest <= longest:
                raise ConfigError(f"{name} are {shortest} to {longest}, must be 1 or more, rising")

    @property
    def natural_rate(self) -> float:
        return 1.0

    @property
    def max_prompt(self) -> int:
        return self.shared_prefix + self.prompt_tokens[1]

    @property
    def max_output(self) -> int:
        return self.output_tokens[1]

    def source(self, seed: int, rate: float | None = None) -> Source:
        return Source(self._jobs(Random(seed), rate or self.natural_rate))

    def _jobs(self, dice: Random, rate: float) -> Iterator[Job]:
        gaps = 0.0
        for number in range(self.num_requests):
            gaps += dice.expovariate(1.0)
            prompt = [Span(f"prompt {number}", _length(dice, self.prompt_tokens))]
            prefix = dice.randrange(NUM_PREFIXES)
            if self.shared_prefix and dice.random() < 0.5:
                prompt.insert(0, Span(f"prefix {prefix}", self.shared_prefix))
            yield Job(
                request_id=f"r{number}",
                arrival=gaps / rate,
                prompt=tuple(prompt),
                num_output=_length(dice, self.output_tokens),
                user=f"user{dice.randrange(self.num_users)}",
            )


def _length(dice: Random, bounds: tuple[int, int]) -> int:
    shortest, longest = bounds
    return min(longest, int(exp(dice.uniform(log(shortest), log(longest + 1)))))
