"""Simulate several cores that share the requests of one or more front ends.

Schedulers, KV managers and the choice of a core are those of the real engine. Each core has its own
virtual clock; a front end learns what a step has done when the step ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np

from engine.errors import ConfigError
from engine.kv.changes import CacheChanges
from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.wire import CacheNews
from engine.rpc.work import Work
from policylab.sim.core import SimulatedCore
from policylab.sim.cores import Ended, OneClock
from policylab.sim.engine import Engine, scheduler_config
from policylab.sim.job import Job
from policylab.sim.records import Floats
from policylab.sim.workloads import Workload


class Router(Protocol):
    """Chooses a core for each request, as ``engine.rpc.balance.Balancer`` does."""

    def choose(self, request: AddRequest) -> int: ...

    def start(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None: ...

    def update(self, core: int, news: CacheNews) -> None: ...


@dataclass(kw_only=True)
class Balanced:
    """The result of a run. Lists have an entry for each request, in the order of their ends."""

    num_prompt: list[int] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    """Seconds from arrival to the first token."""
    cores: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """When the last request ended."""

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in a prefix cache."""
        return sum(self.num_cached) / max(1, sum(self.num_prompt))

    def ttft_at(self, percentile: float) -> float:
        """This percentile of the times to first token, in seconds."""
        times: Floats = np.array(self.ttft)
        return float(np.percentile(times, percentile))


class Reports:
    """What the front ends of a core are sent after its steps."""

    def __init__(self, core: SimulatedCore, num_clients: int) -> None:
        changes = core.kv.follow_cache()
        assert changes is not None
        self._changes: CacheChanges = changes
        self.clients = [Work() for _ in range(num_clients)]

    def news(self) -> list[CacheNews]:
        """What each front end is sent after a step."""
        is_cleared, stored, removed = self._changes.take()
        total = sum(client.load for client in self.clients)
        return [
            CacheNews(0, is_cleared, stored, removed, total - client.load)
            for client in self.clients
        ]


class _Living(NamedTuple):
    job: Job
    front_end: int
    core: int


class _BalancedRun:
    def __init__(
        self,
        make_router: Callable[[], Router],
        workload: Workload,
        engine: Engine,
        *,
        num_cores: int,
        num_front_ends: int,
        seed: int,
        rate: float | None,
    ) -> None:
        self._routers = [make_router() for _ in range(num_front_ends)]
        config = scheduler_config("fcfs", workload, engine)
        cores = [SimulatedCore(config, engine, seed=seed) for _ in range(num_cores)]
        self._reports = [Reports(core, num_front_ends) for core in cores]
        self._clock = OneClock(cores, engine.max_idle_looks)
        self._source = workload.source(seed, rate)
        self._max_tokens = workload.max_output
        self._living: dict[str, _Living] = {}
        self._waits_for_token: dict[str, float] = {}  # arrival by request id
        self._made = Balanced()

    def finish(self) -> Balanced:
        """Simulate until all requests have ended."""
        source, clock = self._source, self._clock
        while source.next_time < inf or clock.next_time < inf:
            if source.next_time < clock.next_time:
                self._arrive(source.take())
            elif (ended := clock.advance()) is not None:
                self._settle(ended)
        return self._made

    def _arrive(self, job: Job) -> None:
        request = job.request(self._max_tokens)
        front_end = crc32(job.program.encode()) % len(self._routers)
        place = self._routers[front_end].choose(request)
        self._reports[place].clients[front_end].add(request)
        self._living[job.request_id] = _Living(job, front_end, place)
        self._waits_for_token[job.request_id] = job.arrival
        sent = msgspec.structs.replace(request, client_index=front_end)
        core = self._clock.cores[place]
        self._clock.send(place, partial(core.add, sent, job.num_output), job.arrival)

    def _settle(self, ended: Ended) -> None:
        for router, news in zip(self._routers, self._reports[ended.core].news(), strict=True):
            router.update(ended.core, news)
        for front_end, batch in ended.outputs.items():
            self._note(ended.core, front_end, batch)

    def _note(self, core: int, front_end: int, batch: CoreOutputs) -> None:
        client = self._reports[core].clients[front_end]
        router, made = self._routers[front_end], self._made
        for started in batch.started:
            name = batch.request_ids[started.index]
            router.start(name)
            client.start(name)
            if (arrival := self._waits_for_token.pop(name, None)) is not None:
                made.ttft.append(batch.time - arrival)
                made.num_cached.append(started.num_cached_tokens)
                made.num_prompt.append(self._living[name].job.num_prompt)
                made.cores.append(self._living[name].core)
        for end in batch.finished:
            name = batch.request_ids[end.index]
            router.end(name)
            client.end(name)
            living = self._living.pop(name)
            del self._clock.cores[core].lengths[name]
            made.seconds = max(made.seconds, batch.time)
            self._source.ended(living.job, batch.time)


def run_balanced(
    make_router: Callable[[], Router],
    workload: Workload,
    engine: Engine,
    *,
    num_cores: int,
    num_front_ends: int = 1,
    seed: int = 0,
    rate: float | None = None,
) -> Balanced:
    """Simulate a workload on ``num_cores`` cores, each as ``engine`` describes, until all requests
    have ended.

    ``make_router``: creates the object by which a front end chooses. Requests of one program go to
    the same front end. Requests arrive at ``rate`` per second, or at the workload's own rate.
    Raises ``ConfigError`` for numbers below 1."""
    for name, number in (("num_cores", num_cores), ("num_front_ends", num_front_ends)):
        if number < 1:
            raise ConfigError(f"{name} is {number}, must be at least 1")
    return _BalancedRun(
        make_router,
        workload,
        engine,
        num_cores=num_cores,
        num_front_ends=num_front_ends,
        seed=seed,
        rate=rate,
    ).finish()
