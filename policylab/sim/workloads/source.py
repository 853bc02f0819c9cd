"""What a workload is: a source of jobs for each seed and rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from math import inf
from typing import ClassVar

from engine.errors import ConfigError
from policylab.sim.job import Follow, Job
from policylab.sim.workloads.tags import Tags, read_tiers, read_users

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

    @property
    def has_followers(self) -> bool:
        """Whether others may come since one has ended."""
        return self._follow is not None

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
        """Keep one job of the iterator in the heap: those after it come no earlier."""
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
    """The name it is requested by."""

    block_size: ClassVar[int] = 16
    """Tokens by which its prefix reuse is counted where no other number is requested."""

    num_requests: int = 1000
    """Requests in all."""
    num_users: int = 0
    """Users ``user0``, ``user1``, ... to whom requests belong; 0: to whom the kind says."""
    user_skew: float = 0.0
    """The n-th of them has a share of ``1 / n**user_skew`` (Zipf); 0: all the same."""
    users: str = ""
    """Users by name instead, as in ``ann(share=3),bob(weight=2)``."""
    tiers: str = ""
    """Classes of requests, as in ``chat(share=0.7,ttft=1,tbt=0.1),batch(share=0.3,offline=True)``:
    ``share``, ``ttft``, ``tbt``, ``deadline`` (seconds), ``priority``, ``offline``, ``hints``."""
    deadlines: tuple[float, float] | None = None
    """Each is to end within this many seconds, log-uniform from the first to the second."""
    num_priorities: int = 0
    """Each has a priority from 0 to below this number, all alike."""

    def __post_init__(self) -> None:
        self.check("num_requests", self.num_requests, 1, MAX_REQUESTS)
        self.tags.check()

    @property
    def tags(self) -> Tags:
        """What its options say of users, tiers, deadlines and priorities."""
        counts_by_default = self.num_users == type(self).num_users
        return Tags(
            users=read_users(self.users),
            tiers=read_tiers(self.tiers),
            # Who names users did not ask for those that a kind counts by default.
            num_users=0 if self.users and counts_by_default else self.num_users,
            user_skew=self.user_skew,
            deadlines=self.deadlines,
            num_priorities=self.num_priorities,
        )

    @property
    def user_weights(self) -> dict[str, float]:
        """Shares of service by user, where they are not all the same."""
        weights = {name: user.weight for name, user in self.tags.users.items()}
        return weights if len(set(weights.values())) > 1 else {}

    @property
    @abstractmethod
    def natural_rate(self) -> float | None:
        """Requests a second where no rate is requested; ``None``: a rate cannot be requested, as
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
        if not (isinstance(value, int | float) and least <= value <= most):
            upto = "" if most == inf else f", and at most {most:g}"
            raise ConfigError(f"{name} is {value!r}, must be {least:g} or more{upto}")

    def __str__(self) -> str:
        options = [
            f"{option.name}={value!r}"
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        ]
        return f"{self.kind}({', '.join(options)})" if options else self.kind
