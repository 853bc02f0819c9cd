"""Requests that are drawn: the same seed draws the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import fmean, pstdev

from engine.errors import ConfigError
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest

END = 0  # the token that ends a text; prompts and outputs are made of others
FIRST_TOKEN = 2
VOCABULARY = 50_000
NUM_PREFIXES = 8


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Poisson arrivals; lengths log-uniform from the shortest to the longest."""

    num_requests: int = 300
    seed: int = 0
    prompt_tokens: tuple[int, int] = (16, 1024)
    """Shortest and longest prompt, without a shared beginning."""
    output_tokens: tuple[int, int] = (8, 512)
    """Shortest and longest output. Every request asks for the longest and ends where it ends."""
    shared_prefix: int = 0
    """Tokens that half of the prompts have in front of them, one of eight texts."""
    num_users: int = 4
    """Requests belong to one of these, each as likely."""

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.num_users < 1 or self.shared_prefix < 0:
            raise ConfigError(
                f"a workload of {self.num_requests} requests of {self.num_users} users with "
                f"{self.shared_prefix} shared tokens cannot be drawn; it needs at least 1, 1 and 0"
            )
        for name in ("prompt_tokens", "output_tokens"):
            shortest, longest = getattr(self, name)
            if not 1 <= shortest <= longest:
                raise ConfigError(f"{name} are {shortest} to {longest}, must be 1 or more, rising")

    @property
    def max_model_len(self) -> int:
        """Length of the longest request there could be."""
        return self.shared_prefix + self.prompt_tokens[1] + self.output_tokens[1]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request to come: when, what, and how many tokens it will turn out to generate."""

    request_id: str
    gaps: float
    """Mean gaps between two arrivals that have passed when it comes."""
    prompt: list[int]
    num_output: int
    user: str

    def request(self, arrival_time: float, max_tokens: int, *, tell_length: bool) -> AddRequest:
        """What the scheduler sees; its true length only if an oracle is to tell it."""
        return AddRequest(
            self.request_id,
            self.prompt,
            SamplingParams(max_tokens=max_tokens),
            seed=0,
            arrival_time=arrival_time,
            max_tokens=max_tokens,
            eos_token_ids=[END],
            user=self.user,
            hints={"output_tokens": self.num_output} if tell_length else None,
        )


def draw(workload: Workload) -> list[Job]:
    """The requests in order of arrival."""
    dice = Random(workload.seed)
    prefixes = [_tokens(dice, workload.shared_prefix) for _ in range(NUM_PREFIXES)]
    return list(_jobs(workload, dice, prefixes))


def dispersion(jobs: list[Job]) -> float:
    """Standard deviation of the requests' sizes in tokens, as a share of their mean."""
    sizes = [len(job.prompt) + job.num_output for job in jobs]
    return pstdev(sizes) / fmean(sizes)


def _jobs(workload: Workload, dice: Random, prefixes: list[list[int]]) -> Iterator[Job]:
    gaps = 0.0
    for number in range(workload.num_requests):
        gaps += dice.expovariate(1.0)
        prefix = dice.choice(prefixes) if dice.random() < 0.5 else []
        yield Job(
            request_id=f"r{number}",
            gaps=gaps,
            prompt=prefix + _tokens(dice, _length(dice, workload.prompt_tokens)),
            num_output=_length(dice, workload.output_tokens),
            user=f"user{dice.randrange(workload.num_users)}",
        )


def _length(dice: Random, bounds: tuple[int, int]) -> int:
    shortest, longest = bounds
    return min(longest, int(exp(dice.uniform(log(shortest), log(longest + 1)))))


def _tokens(dice: Random, count: int) -> list[int]:
    return [dice.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]
