"""Statistics of a workload."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from policylab.sim.job import Job
from policylab.sim.workloads.lengths import SHARES
from policylab.sim.workloads.reuse import PrefixReuse
from policylab.sim.workloads.source import JobSource

Floats = NDArray[np.float64]

FIRST_TOKEN_SECONDS = 0.5
TOKEN_SECONDS = 0.02


def as_if_served(source: JobSource) -> Iterator[Job]:
    """All jobs in order of arrival, including those that follow the end of another job. Every job
    is assumed to take 0.5 s to its first token and 0.02 s for each further token."""
    ends: list[tuple[float, int, Job]] = []
    number = 0
    while source.next_time < inf or ends:
        if ends and ends[0][0] <= source.next_time:
            time, _, job = heappop(ends)
            source.ended(job, time)
            continue
        job = source.take()
        if source.has_followers:
            number += 1
            seconds = FIRST_TOKEN_SECONDS + TOKEN_SECONDS * (job.num_output - 1)
            heappush(ends, (job.arrival + seconds, number, job))
        yield job


@dataclass
class JobGroup:
    """Counts of the requests and tokens of one user, tier or adapter."""

    num_requests: int = 0
    num_prompt: int = 0
    """Prompt tokens."""
    num_output: int = 0
    with_deadline: int = 0
    """The number of requests with a deadline."""
    with_promise: int = 0
    """The number of requests with a promised TTFT or time between tokens."""
    priorities: Counter[int] = field(default_factory=Counter)

    def add(self, job: Job) -> None:
        self.num_requests += 1
        self.num_prompt += job.num_prompt
        self.num_output += job.num_output
        self.with_deadline += job.deadline is not None
        self.with_promise += job.ttft is not None or job.tbt is not None
        self.priorities[job.priority] += 1


class Description:
    """Statistics of jobs, which are added in order of arrival."""

    def __init__(self, block_size: int) -> None:
        self.reuse = PrefixReuse(block_size)
        self.users: dict[str, JobGroup] = {}
        self.tiers: dict[str, JobGroup] = {}
        self.adapters: dict[str, JobGroup] = {}
        self.programs: Counter[str] = Counter()
        self.has_followers = False
        """True if some jobs follow the end of others."""
        self._arrivals = array("d")
        self._prompts = array("q")
        self._outputs = array("q")

    def watch(self, jobs: Iterator[Job]) -> Iterator[Job]:
        """Yield the jobs unchanged, adding each of them to the statistics."""
        for job in jobs:
            self.add(job)
            yield job

    def add(self, job: Job) -> None:
        """Add a job."""
        self._arrivals.append(job.arrival)
        self._prompts.append(job.num_prompt)
        self._outputs.append(job.num_output)
        self.reuse.add(job)
        self.users.setdefault(job.user, JobGroup()).add(job)
        self.tiers.setdefault(job.tier, JobGroup()).add(job)
        self.adapters.setdefault(job.adapter, JobGroup()).add(job)
        if job.program:
            self.programs[job.program] += 1

    @property
    def num_requests(self) -> int:
        return len(self._arrivals)

    @property
    def seconds(self) -> float:
        """The time of the last arrival, in seconds."""
        return self._arrivals[-1] if self._arrivals else 0.0

    @property
    def rate(self) -> float:
        """Requests per second; infinity if all arrive at once."""
        return self.num_requests / self.seconds if self.seconds else inf

    @property
    def gap_cv(self) -> float:
        """Coefficient of variation of the arrival gaps; NaN for fewer than two requests."""
        gaps = np.diff(np.array(self._arrivals))
        return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.any() else nan

    def dispersion(self, seconds: float) -> float:
        """Variance over mean of the arrivals per window of ``seconds`` seconds: 1 for a Poisson
        process, NaN for fewer than two complete windows."""
        times = np.array(self._arrivals)
        number = int(self.seconds // seconds)
        if number < 2:
            return nan
        counts = np.bincount((times // seconds).astype(np.int64), minlength=number)[:number]
        return float(counts.var() / counts.mean())

    def lengths(self) -> dict[str, Floats]:
        """For "prompt" and "output", the mean length in tokens followed by the quantiles at
        ``SHARES`` [1 + len(SHARES)]."""
        columns = {"prompt": self._prompts, "output": self._outputs}
        return {
            name: np.array([np.mean(column), *np.quantile(column, SHARES)])
            for name, column in columns.items()
        }
