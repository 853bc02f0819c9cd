"""Open loop: requests that arrive independently of the engine and of other requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from engine.errors import ConfigError
from policylab.sim.job import NOTHING, Job, Span
from policylab.sim.workloads.arrivals import Arrivals, find_arrivals
from policylab.sim.workloads.draws import CHUNK, RandomDraws
from policylab.sim.workloads.lengths import Lengths
from policylab.sim.workloads.source import JobSource, Workload

TRACE = "trace"


class Body(NamedTuple):
    """The prompt and output length of a request, and further ``fields`` of its job, which the
    workload's options (users, tiers, ...) override."""

    prompt: tuple[Span, ...]
    num_output: int
    fields: Mapping[str, Any] = NOTHING


def pairs(lengths: Lengths, dice: RandomDraws, name: str = "") -> Iterator[tuple[int, int]]:
    """An endless iterator of random (prompt length, output length). ``name``: suffix of the names
    of the random streams."""
    prompts, outputs = dice.stream(f"prompts{name}"), dice.stream(f"outputs{name}")
    while True:
        drawn = (lengths.prompt.draw(prompts, CHUNK), lengths.output.draw(outputs, CHUNK))
        yield from zip(*(column.tolist() for column in drawn), strict=True)


def uniform(rng: np.random.Generator) -> Iterator[float]:
    """An endless iterator of uniform random numbers in [0, 1)."""
    while True:
        yield from rng.random(CHUNK).tolist()


@dataclass(frozen=True, kw_only=True)
class OpenLoop(Workload):
    """A workload whose requests arrive independently of the engine."""

    trace: ClassVar[Arrivals | None] = None
    """The arrival process of the trace that the workload imitates, for ``arrivals="trace"``."""
    own_rate: ClassVar[float] = 1.0
    """Requests per second if no other rate is given."""

    arrivals: str = "poisson"
    """``poisson``, ``gamma(cv=2)``, ``onoff(on=10,off=30)``, ``ramp(first=0.2,last=1.8)`` or
    ``burst(every=60,seconds=5,times_as_many=10)``; all but the first accept ``cv``."""

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        self.process  # noqa: B018 - it checks the option

    @property
    def process(self) -> Arrivals:
        """The arrival process of option ``arrivals``. Raises ``ConfigError`` if it is unknown."""
        if self.arrivals != TRACE:
            return find_arrivals(self.arrivals)
        if self.trace is None:
            raise ConfigError(
                f"workload {self.kind!r} has no arrivals of its own; use arrivals='poisson', "
                "'gamma(cv=2)' or another"
            )
        return self.trace

    @property
    def natural_rate(self) -> float:
        return self.own_rate

    @abstractmethod
    def bodies(self, dice: RandomDraws) -> Iterator[Body]:
        """An endless iterator of the prompts and output lengths of requests."""

    def source(self, seed: int, rate: float | None = None) -> JobSource:
        return JobSource(self._jobs(RandomDraws(seed), rate or self.natural_rate))

    def _jobs(self, dice: RandomDraws, rate: float) -> Iterator[Job]:
        bodies, tags = self.bodies(dice), self.tags.draw(dice)
        times = self.process.times(dice, rate, self.num_requests)
        for number, time in enumerate(islice(times, self.num_requests)):
            prompt, num_output, fields = next(bodies)
            own = {"num_output": num_output, **fields, **next(tags)}
            yield Job(request_id=f"r{number}", arrival=time, prompt=prompt, **own)
