"""ApartRun: simulates prefill and decode cores on one clock, and the link between them.

    a request ──> PrefillApart chooses ──> a decode core, where it waits for its prompt's blocks
                                       └─> a prefill core computes and stores them
    the decode core loads the blocks over the link, one transfer after another, and decodes
    a load does not pay, or takes more than 10 s ──> the decode core computes the prompt

Schedulers, KV managers, the choice of cores and of what is loaded are the engine's own. Without
prefill cores, all cores are equal and share the requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as replace_job
from functools import partial
from math import inf
from typing import Any

from msgspec.structs import replace

from engine.errors import RequestError
from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.stats import SchedulerStats
from engine.messages.wire import CacheNews
from engine.rpc.apart import PrefillApart, Roles
from engine.rpc.balance import Balancer
from engine.rpc.joined import sum_of
from policylab.sim.core import SimulatedCore
from policylab.sim.cores import OneClock
from policylab.sim.engine import Engine, scheduler_config
from policylab.sim.job import Job
from policylab.sim.kv_groups import KVPeaks
from policylab.sim.records import Seen, totals_of
from policylab.sim.tiers import LinkedShelf, SimulatedTiers
from policylab.sim.workloads import Workload
from policylab.verify.reached import Message, ReachedCore


class PromptCore:
    """A core, as messages of ``PrefillApart`` reach it."""

    def __init__(self, run: ApartRun, place: int) -> None:
        self._run = run
        self._place = place
        self._core = run.clock.cores[place]
        self.call = self._core.call

    def add(self, request: AddRequest) -> None:
        self._core.add(request, request.max_tokens)

    def abort(self, request_ids: Sequence[str]) -> None:
        ended = self._core.scheduler.finish_requests(request_ids)
        names = [each.request_id for each in ended]
        ends = [replace(each.end, index=index) for index, each in enumerate(ended)]
        nothing = [0] * len(names)
        batch = CoreOutputs(names, [], nothing, self._run.now, finished=ends)
        self._run.late.append((self._place, batch))


class ApartRun:
    """A simulation of several cores in progress. ``late``: outputs that belong to no step,
    with their core."""

    def __init__(
        self, policy: Any, workload: Workload, engine: Engine, *, seed: int, rate: float | None
    ) -> None:
        config = scheduler_config(policy, workload, engine)
        self.now = 0.0
        self.late: list[tuple[int, CoreOutputs]] = []
        self._max_tokens = workload.max_output
        self._max_model_len = config.max_model_len
        self._tells_length = engine.length_predictor == "oracle"
        num_prefill, link = engine.prefill_cores, LinkedShelf(engine.kv_link)
        self.link = link
        cores = []
        for place in range(engine.num_cores):
            make_tiers = partial(
                SimulatedTiers,
                engine.kv_tiers,
                link=link if num_prefill else None,
                fills_link=place < num_prefill,
            )
            has_tiers = num_prefill or engine.kv_tiers
            cores.append(
                SimulatedCore(
                    config,
                    engine,
                    seed=seed + place,
                    make_tiers=make_tiers if has_tiers else None,
                )
            )
        self.clock = OneClock(cores, engine.max_idle_looks)
        self._changes = [core.kv.follow_cache() for core in cores]
        self._balancer = Balancer(len(cores), engine.block_size)
        self._apart: PrefillApart | None = None
        if num_prefill:
            self._apart = PrefillApart(
                Roles(num_prefill, engine.prefill_threshold),
                [
                    ReachedCore(PromptCore(self, place), partial(self.send, place))
                    for place in range(len(cores))
                ],
                self._balancer,
                self._named,
                clock=lambda: self.now,
            )
        self._source = workload.source(seed, rate)
        self.seen = Seen()
        self._waiting: set[str] = set()  # requests that wait for their prompts' blocks
        self._num_moved = 0  # tokens that they found in the prefix cache

    def finish(self) -> None:
        """Simulate until all requests have ended."""
        source, clock = self._source, self.clock
        while True:
            due = inf if self._apart is None else self._apart.next_due
            at = min(source.next_time, clock.next_time, due)
            if at == inf:
                return
            self.now = max(self.now, at)
            if source.next_time <= at:
                self._arrive(source.take())
            elif clock.next_time <= at:
                ended = clock.advance()
                if ended is not None:
                    self._report(ended.core)
                    self._take(ended.core, list(ended.outputs.values()))
                late, self.late = self.late, []
                for core, batch in late:
                    self._take(core, [batch])
            elif self._apart is not None:
                self._apart.tend()

    def send(self, core: int, message: Message) -> None:
        """Send a message to a core."""
        self.clock.send(core, message, self.now)

    def totals(self) -> dict[str, Any]:
        """The counters of all schedulers, added, and the hash of all decisions."""
        cores = self.clock.cores
        stats = self._stats()
        peaks, decisions = KVPeaks(cores[0].kv.groups), hashlib.blake2b(digest_size=16)
        for core in cores:
            peaks.add(core.worker.kv_peaks.usage, core.worker.kv_peaks.blocks)
            peaks.snapshots = max(peaks.snapshots, core.worker.kv_peaks.snapshots)
            decisions.update(core.worker.decisions.encode())
        found = totals_of(stats, peaks)
        counters = {name: int(number) for name, number in found["counters"].items()}
        if self._apart is not None:
            counters["kv link.blocks"] = self.link.num_moved
        found["counters"] = counters
        found["prefix_hits"] -= self._num_moved
        return {
            **found,
            "busy_seconds": sum(core.worker.busy_seconds for core in cores),
            "decisions": decisions.hexdigest(),
        }

    @property
    def hook_seconds(self) -> float:
        """Real time in the policy's hooks."""
        return sum(self._stats().hook_seconds.values())

    def _stats(self) -> SchedulerStats:
        stats = sum_of([core.scheduler.make_stats() for core in self.clock.cores])
        if self._apart is not None:
            stats = self._apart.add_to(stats)
        assert stats is not None
        return stats

    def _arrive(self, job: Job) -> None:
        if 1 <= (most := self._max_model_len - job.num_prompt) < job.num_output:
            job = replace_job(job, num_output=most)  # the engine cuts it at its maximum length
        try:
            request = job.request(self._max_tokens, tell_length=self._tells_length)
        except RequestError:
            self._refuse(job)
            return
        apart = self._apart
        if apart is None:
            core = self._balancer.choose(request)
        else:
            core, request = apart.choose(request)
            if request.kv_transfer_params is not None:
                self._waiting.add(job.request_id)
        self.seen.came(job)
        self.send(core, partial(self._add, self.clock.cores[core], job, request))
        if apart is not None:
            apart.tend()

    def _add(self, core: SimulatedCore, job: Job, request: AddRequest) -> None:
        try:
            core.add(request, job.num_output)
        except RequestError:
            self._refuse(job)

    def _refuse(self, job: Job) -> None:
        self.seen.refused(job)
        self._balancer.end(job.request_id)
        if self._apart is not None:
            self._apart.end(job.request_id)
            self._apart.tend()
        self._source.ended(job, self.now)

    def _report(self, core: int) -> None:
        """Let the balancer know what has changed in a core's prefix cache."""
        changes = self._changes[core]
        if changes is not None:
            self._balancer.update(core, CacheNews(0, *changes.take(), 0))

    def _take(self, core: int, batches: list[CoreOutputs]) -> None:
        """Note the outputs of a step."""
        for batch in batches:
            for started in batch.started:
                name = batch.request_ids[started.index]
                self._balancer.start(name)
                if name in self._waiting:
                    self._waiting.discard(name)
                    self._num_moved += started.num_cached_tokens
            for end in batch.finished:
                self._balancer.end(batch.request_ids[end.index])
                del self.clock.cores[core].lengths[batch.request_ids[end.index]]
        if self._apart is not None:
            batches = self._apart.take(batches)
        for job, ended_at in self.seen.note(batches):
            self._source.ended(job, ended_at)

    @contextmanager
    def _named(self, core: int) -> Iterator[None]:
        """No core dies here."""
        yield
