"""What a workload is: a source of jobs for each seed and rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from math import inf
from typing import ClassVar

from engine.errors import ConfigError
from engine.sim.job import Follow, Job

MAX_REQUESTS = 100_000_000


class Source:
    """Jobs in order of their arrival, drawn as they are taken.

    Those of ``jobs`` come by themselves, in order; ``follow`` names those that come since another
    has ended.
    """

    def __init__(self, jobs: Iterator[Job], follow: Follow | None = None) -> None:
        self._jobs = jobs
        self._follow = follow
        self._coming: list[tuple[float, int, Job]] = []
        self._num_seen = 0  # of two that come at once, the one that was known first
        self._newest = -1
        self._draw()

    @property
    def next_time(self) -> float:
        """When the next job comes; infinity while none does."""
        return self._coming[0][0] if self._coming else inf

    def take(self) -> Job:
        """The job that comes next."""
        _, number, job = heappop(self._coming)
        if number == self._newest:
            self._draw()
        return job

    def ended(self, job: Job, time: float) -> None:
        """A job has ended, in whatever way: others may follow."""
        if self._follow is not None:
            for follower in self._follow(job, time):
                self._push(follower)

    def __iter__(self) -> Iterator[Job]:
        """All that come by themselves, and none that follow."""
        while self._coming:
            yield self.take()

    def _draw(self) -> None:
        """Keep one job of the iterator in the heap: those behind it come no earlier."""
        self._newest = -1
        job = next(self._jobs, None)
        if job is not None:
            self._newest = self._num_seen
            self._push(job)

    def _push(self, job: Job) -> None:
        heappush(self._coming, (job.arrival, self._num_seen, job))
        self._num_seen += 1


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """Requests of one kind. The same options and seed give the same jobs.

    A workload has a rate of its own, ``natural_rate``, at which it comes where no other is named.
    """

    kind: ClassVar[str]
    """The name it is asked for by."""

    num_requests: int = 1000
    """Requests in all."""

    def __post_init__(self) -> None:
        self.check("num_requests", self.num_requests, 1, MAX_REQUESTS)

    @property
    @abstractmethod
    def natural_rate(self) -> float | None:
        """Requests a second where no rate is asked for; ``None``: a rate cannot be asked for, as
        requests come when others have ended (a closed loop)."""

    @property
    @abstractmethod
    def max_prompt(self) -> int:
        """Tokens of the longest prompt there could be."""

    @property
    @abstractmethod
    def max_output(self) -> int:
        """Tokens that every request asks for; each ends at a length of its own."""

    @abstractmethod
    def source(self, seed: int, rate: float | None = None) -> Source:
        """The jobs of a seed, which come at this mean rate (requests a second)."""

    @property
    def max_model_len(self) -> int:
        """Length of the longest request there could be."""
        return self.max_prompt + self.max_output

    def check(self, name: str, value: float, least: float, most: float = inf) -> None:
        """Raise ``ConfigError`` for an option out of its bounds."""
        if not least <= value <= most:
            upto = "" if most == inf else f", and at most {most:g}"
            raise ConfigError(f"{name} is {value:g}, must be {least:g} or more{upto}")

    def __str__(self) -> str:
        told = [
            f"{option.name}={value!r}"
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        ]
        return f"{self.kind}({', '.join(told)})" if told else self.kind
