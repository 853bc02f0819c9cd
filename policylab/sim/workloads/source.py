"""Workload, the base class of all workloads, and JobSource, its jobs for one seed and rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from math import inf
from typing import ClassVar

from policylab.sim.job import Follow, Job
from policylab.sim.named import check_number
from policylab.sim.workloads.tags import Tags, read_tiers, read_users

MAX_REQUESTS = 100_000_000


class JobSource:
    """Jobs in order of arrival, drawn when they are needed.

    ``jobs`` are those with a given arrival time, in order; ``follow(job, time)`` returns the jobs
    that arrive because ``job`` ended at ``time`` (seconds)."""

    def __init__(self, jobs: Iterator[Job], follow: Follow | None = None) -> None:
        self._jobs = jobs
        self._follow = follow
        self._coming: list[tuple[float, int, Job]] = []
        self._num_seen = 0  # breaks ties: the job that was known first
        self._newest = -1
        self._draw()

    @property
    def next_time(self) -> float:
        """The arrival time of the next job in seconds; infinity if none is known."""
        return self._coming[0][0] if self._coming else inf

    @property
    def has_followers(self) -> bool:
        """True if jobs may arrive because another job has ended."""
        return self._follow is not None

    def take(self) -> Job:
        """Remove the next job and return it."""
        _, number, job = heappop(self._coming)
        if number == self._newest:
            self._draw()
        return job

    def ended(self, job: Job, time: float) -> None:
        """Report the end of a job at ``time`` (seconds), for any reason; other jobs may follow
        it."""
        if self._follow is not None:
            for follower in self._follow(job, time):
                self._push(follower)

    def __iter__(self) -> Iterator[Job]:
        """Take all jobs in turn, except those that arrive only after another job has ended."""
        while self._coming:
            yield self.take()

    def _draw(self) -> None:
        """Draw the next job that has an arrival time, and add it to the heap."""
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
    """Base class of workloads: options from which requests are drawn. The same options and seed
    give the same jobs."""

    kind: ClassVar[str]
    """The name of the kind."""

    block_size: ClassVar[int] = 16
    """Default block size in tokens for counting prefix reuse."""

    num_requests: int = 1000
    """Number of requests."""
    num_users: int = 0
    """The number of users, named ``user0``, ``user1``, ...; 0: the users that this kind of workload
    has by itself."""
    user_skew: float = 0.0
    """The n-th user has a share of the requests proportional to ``1 / n**user_skew`` (Zipf); 0:
    equal shares."""
    users: str = ""
    """Named users in place of numbered ones, as in ``ann(share=3),bob(weight=2)``."""
    tiers: str = ""
    """Classes of requests, as in ``chat(share=0.7,ttft=1,tbt=0.1),batch(share=0.3,offline=True)``,
    with ``share``, ``ttft``, ``tbt``, ``deadline`` (seconds), ``priority``, ``offline``,
    ``hints``."""
    deadlines: tuple[float, float] | None = None
    """The least and the greatest deadline, in seconds after arrival; log-uniform in between."""
    num_priorities: int = 0
    """How many priorities there are, numbered from 0, with equal shares of the requests."""
    max_tokens: str = "longest"
    """The ``max_tokens`` of requests: ``longest``, the workload's longest output (in a file, that
    of the request, if it has one), or ``own``, the request's own output length."""
    num_adapters: int = 0
    """The number of LoRA adapters, named ``adapter0``, ``adapter1``, ...; 0: none is used."""
    adapter_skew: float = 1.0
    """The n-th adapter has a share of the requests proportional to ``1 / n**adapter_skew`` (Zipf);
    0: equal shares."""
    base_share: float = 0.0
    """With adapters: the share of requests that use the base model."""

    def __post_init__(self) -> None:
        self.check("num_requests", self.num_requests, 1, MAX_REQUESTS)
        self.tags.check()

    @property
    def tags(self) -> Tags:
        """The workload's options for users, tiers, deadlines, priorities, limits and adapters."""
        counts_by_default = self.num_users == type(self).num_users
        return Tags(
            users=read_users(self.users),
            tiers=read_tiers(self.tiers),
            # Named users replace the number of users that a kind has by default.
            num_users=0 if self.users and counts_by_default else self.num_users,
            user_skew=self.user_skew,
            deadlines=self.deadlines,
            num_priorities=self.num_priorities,
            max_tokens=self.max_tokens,
            num_adapters=self.num_adapters,
            adapter_skew=self.adapter_skew,
            base_share=self.base_share,
        )

    @property
    def user_weights(self) -> dict[str, float]:
        """The weight of each user for fair policies; empty if all weights are equal."""
        weights = {name: user.weight for name, user in self.tags.users.items()}
        return weights if len(set(weights.values())) > 1 else {}

    @property
    @abstractmethod
    def natural_rate(self) -> float | None:
        """Requests per second if no rate is given; ``None`` for a closed loop, which can have no
        rate."""

    @property
    @abstractmethod
    def max_prompt(self) -> int:
        """The largest possible number of prompt tokens."""

    @property
    @abstractmethod
    def max_output(self) -> int:
        """The largest possible number of output tokens, and the ``max_tokens`` of requests that set
        none."""

    @abstractmethod
    def source(self, seed: int, rate: float | None = None) -> JobSource:
        """The jobs for this seed and mean rate (requests per second; ``None``: the natural
        rate)."""

    @property
    def max_model_len(self) -> int:
        """The largest possible number of prompt and output tokens of a request."""
        return self.max_prompt + self.max_output

    check = staticmethod(check_number)

    def __str__(self) -> str:
        options = [
            f"{option.name}={value!r}"
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        ]
        return f"{self.kind}({', '.join(options)})" if options else self.kind
