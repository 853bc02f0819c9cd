"""Simulate several cores that share the requests of one or more front ends.

Schedulers, KV managers and the choice of a core are those of the real engine. Each core has its own
virtual clock; a front end learns what a step has done when the step ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np

from engine.core.engine_core import EngineCore
from engine.errors import ConfigError
from engine.kv.changes import CacheChanges
from engine.kv.manager import KVManager
from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.wire import CacheNews
from engine.rpc.work import Work
from engine.sched.plugins.find import choose, make_scheduler
from policylab.sim.job import Job
from policylab.sim.records import Floats
from policylab.sim.run import Engine, scheduler_config
from policylab.sim.timing import timing
from policylab.sim.worker import TimedWorker, VirtualClock
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


class _Event(NamedTuple):
    """A step of a core ends, with these outputs (``None``: the core begins)."""

    time: float
    number: int
    core: int
    outputs: Mapping[int, CoreOutputs] | None


class _Core:
    """A simulated core. Requests that arrive during a step are added when it ends."""

    def __init__(self, workload: Workload, engine: Engine, seed: int, num_clients: int) -> None:
        config = scheduler_config("fcfs", workload, engine)
        self.clock = VirtualClock()
        self.lengths: dict[str, int] = {}  # output tokens of unfinished requests
        chosen = choose(config)
        blocks = chosen.pool(engine.num_blocks)
        kv = KVManager(blocks, engine.block_size, groups=engine.groups)
        scheduler = make_scheduler(
            config, kv, clock=self.clock, timer=time.perf_counter, seed=seed, chosen=chosen
        )
        cost = timing(engine.cost, seed)
        self._worker = TimedWorker(self.clock, cost, engine.max_num_seqs, self.lengths)
        self._core = EngineCore(scheduler, self._worker, engine.depth)
        changes = kv.follow_cache()
        assert changes is not None
        self._changes: CacheChanges = changes
        self.arrived: list[AddRequest] = []
        self.is_busy = False
        self.clients = [Work() for _ in range(num_clients)]

    def step(self) -> Mapping[int, CoreOutputs] | None:
        """Add what has arrived and run a step, which moves the clock. ``None``: nothing to do."""
        for request in self.arrived:
            self._core.scheduler.add_request(request)
        self.arrived.clear()
        if not self._core.has_work:
            return None
        outputs = self._core.step()
        self._worker.rest()
        return outputs

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
        self._cores = [_Core(workload, engine, seed, num_front_ends) for _ in range(num_cores)]
        self._source = workload.source(seed, rate)
        self._max_tokens = workload.max_output
        self._events: list[_Event] = []
        self._num_events = 0
        self._living: dict[str, _Living] = {}
        self._waits_for_token: dict[str, float] = {}  # arrival by request id
        self._made = Balanced()

    def finish(self) -> Balanced:
        """Simulate until all requests have ended."""
        source, events = self._source, self._events
        while source.next_time < inf or events:
            if events and events[0].time <= source.next_time:
                self._settle(heappop(events))
            else:
                self._arrive(source.take())
        return self._made

    def _arrive(self, job: Job) -> None:
        request = job.request(self._max_tokens)
        front_end = crc32(job.program.encode()) % len(self._routers)
        place = self._routers[front_end].choose(request)
        core = self._cores[place]
        core.arrived.append(msgspec.structs.replace(request, client_index=front_end))
        core.lengths[job.request_id] = job.num_output
        core.clients[front_end].add(request)
        self._living[job.request_id] = _Living(job, front_end, place)
        self._waits_for_token[job.request_id] = job.arrival
        if not core.is_busy:
            core.is_busy = True
            core.clock.now = max(core.clock.now, job.arrival)
            self._push(core.clock.now, place, None)

    def _push(self, at: float, core: int, outputs: Mapping[int, CoreOutputs] | None) -> None:
        heappush(self._events, _Event(at, self._num_events, core, outputs))
        self._num_events += 1

    def _settle(self, event: _Event) -> None:
        core = self._cores[event.core]
        if event.outputs is not None:
            for router, news in zip(self._routers, core.news(), strict=True):
                router.update(event.core, news)
            for front_end, batch in event.outputs.items():
                self._note(core, front_end, batch)
        outputs = core.step()
        core.is_busy = outputs is not None
        if outputs is not None:
            self._push(core.clock.now, event.core, outputs)

    def _note(self, core: _Core, front_end: int, batch: CoreOutputs) -> None:
        router, client, made = self._routers[front_end], core.clients[front_end], self._made
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
            del core.lengths[name]
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
