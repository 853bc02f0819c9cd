"""Closed loop: clients that wait for each answer, think, and send the next request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from engine.errors import ConfigError
from policylab.sim.job import Job, Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import Lengths, find_lengths
from policylab.sim.workloads.source import JobSource, Workload

MAX_CLIENTS = 100_000
FEW = 64  # requests per client that are drawn in one call


@dataclass(frozen=True, kw_only=True)
class ClosedLoop(Workload):
    """A fixed number of clients, each of which waits for an answer, pauses, and sends its next
    request.

    Requests are divided evenly among clients. A client's requests do not depend on the others."""

    kind: ClassVar[str] = "closed-loop"

    clients: int = 32
    """Number of clients, which bounds the requests in the engine."""
    think: float = 1.0
    """Mean seconds from an answer to the next request (exponential)."""
    lengths: str = "log-uniform"
    """Lengths: ``log-uniform(prompt=(16, 1024), output=(8, 512))``, ``fixed(prompt=256,
    output=64)`` or the name of a trace, such as ``azure-conv``."""

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        self.check("clients", self.clients, 1, MAX_CLIENTS)
        self.check("think", self.think, 0.0, 1e6)
        self._lengths  # noqa: B018 - it checks the option

    @property
    def natural_rate(self) -> None:
        return None

    @property
    def max_prompt(self) -> int:
        return self._lengths.prompt.longest

    @property
    def max_output(self) -> int:
        return self._lengths.output.longest

    @cached_property
    def _lengths(self) -> Lengths:
        return find_lengths(self.lengths)

    def source(self, seed: int, rate: float | None = None) -> JobSource:
        if rate is not None:
            raise ConfigError(
                f"{self} sends a request when another ends, so it has no rate; leave it out, and "
                "set clients and think instead"
            )
        dice = RandomDraws(seed)
        tags = self.tags.draw(dice)
        count, more = divmod(self.num_requests, self.clients)
        clients = [
            _Client(f"client{number}", self, dice, count + (number < more), next(tags))
            for number in range(min(self.clients, self.num_requests))
        ]
        by_name = {client.name: client for client in clients}

        def follow(job: Job, time: float) -> Iterable[Job]:
            return by_name[job.program].after(time)

        first = [job for client in clients for job in client.after(0.0)]
        return JobSource(iter(sorted(first, key=lambda job: job.arrival)), follow)

    def draws(self, rng: np.random.Generator) -> Iterator[tuple[float, int, int]]:
        """An endless iterator over a client's requests: the pause before the request (seconds), its
        prompt tokens and its output tokens."""
        while True:
            columns = (
                rng.exponential(self.think, FEW) if self.think else np.zeros(FEW),
                self._lengths.prompt.draw(rng, FEW),
                self._lengths.output.draw(rng, FEW),
            )
            yield from zip(*(column.tolist() for column in columns), strict=True)


class _Client:
    """A client of the closed loop, with its remaining requests."""

    def __init__(
        self, name: str, workload: ClosedLoop, dice: RandomDraws, num_left: int, tag: dict[str, Any]
    ) -> None:
        self.name = name
        self._draws = workload.draws(dice.stream(name))
        self._num_left = num_left
        self._num_taken = 0
        self._fields = {"user": name, **tag}

    def after(self, time: float) -> Iterator[Job]:
        """Yield the client's next request, if any is left; ``time``: the end of its last one in
        seconds."""
        if self._num_taken == self._num_left:
            return
        self._num_taken += 1
        pause, num_prompt, num_output = next(self._draws)
        request_id = f"{self.name}.{self._num_taken}"
        yield Job(
            request_id=request_id,
            arrival=time + pause,
            prompt=(Span(f"prompt {request_id}", num_prompt),),
            program=self.name,
            **{"num_output": num_output, **self._fields},
        )
