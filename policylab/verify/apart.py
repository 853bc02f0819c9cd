"""ApartSimulation: runs a case on prefill and decode cores, which the engine's routing chooses.

Each core is a ``Simulation`` with all its checks; all use the same stores. Messages reach a core
late, cores die unnoticed, stores have faults. Each request must end once, with the right tokens,
and the routing must keep nothing of it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import msgspec

from engine.errors import EngineDeadError, RequestError
from engine.kv.changes import CacheChanges
from engine.messages.requests import AddRequest, CoreOutputs, Finished
from engine.messages.wire import CacheNews
from engine.rpc.apart import SUFFIX, PrefillApart, Roles
from engine.rpc.balance import Balancer
from engine.sched.interface import PauseState, StepOutputs
from policylab.verify.case import Abort, Add, Case, Event, Jump, Kill, Setup
from policylab.verify.halves import MakeHalves
from policylab.verify.reached import Message, ReachedCore
from policylab.verify.simulation import CaseOutcome, Simulation
from policylab.verify.tiers import SimulatedTiers

READS = 0.7  # share of its ticks in which a core reads its messages
SLACK_ROUNDS = 1000  # of the end of a run: a request waits a second for blocks, in 64 ticks


def is_apart(setup: Setup) -> bool:
    """True if a case runs on prefill and decode cores."""
    has_cores = bool(setup.prefill_cores and setup.decode_cores)
    return has_cores and setup.caching and SimulatedTiers.name in setup.needs


class Place:
    """One of the cores: what reaches it, and what its client knows."""

    def __init__(self, run: ApartSimulation, number: int, simulation: Simulation) -> None:
        self._run = run
        self._number = number
        self.simulation = simulation
        self.inbox: deque[Message] = deque()
        self.ticks_to_notice = -1  # until its death is noticed; -1: it lives
        self.fails_at: dict[str, int | None] = {}
        changes = simulation.scheduler.kv.follow_cache()
        assert changes is not None
        self.changes: CacheChanges = changes

    def send(self, message: Message) -> None:
        """Send a message. Raises ``EngineDeadError`` if the core has died."""
        if self.ticks_to_notice >= 0:
            raise EngineDeadError("the core was killed")
        self.inbox.append(message)

    def read(self) -> None:
        """Let the core do what its messages say."""
        while self.inbox:
            self.inbox.popleft()()

    def add(self, request: AddRequest) -> None:
        name = request.request_id
        if not self.simulation.add(request, self.fails_at.pop(name, None)):
            raise RequestError(f"{name} is refused")

    def abort(self, request_ids: Sequence[str]) -> None:
        names = [each.request_id for each in self.simulation.clients.alive(list(request_ids))]
        self.simulation.happen(Abort(0, list(request_ids)))
        ends = [Finished(index, "abort") for index in range(len(names))]
        batch = CoreOutputs(names, [], [0] * len(names), 0.0, finished=ends)
        self._run.take(self._number, {0: batch})

    def call(self, name: str, *args: Any) -> None:
        tiers = self.simulation.tiers
        assert tiers is not None
        tiers.methods[name](*args)


class ApartSimulation:
    """Runs a case on several cores. Options are those of ``Simulation``. Raises ``AssertionError``
    for a broken rule."""

    def __init__(
        self,
        case: Case,
        *,
        every: int = 1,
        leaks: bool = True,
        halves: MakeHalves | None = None,
    ) -> None:
        setup = case.setup
        self.case = case
        self.now = 0.0
        self._rng = Random(setup.seed)
        self._places: list[Place] = []
        for number in range(setup.prefill_cores + setup.decode_cores):
            own = msgspec.structs.replace(setup, seed=setup.seed + number)
            core = msgspec.structs.replace(case, setup=own, events=[])
            simulation = Simulation(core, every=every, leaks=leaks, halves=halves)
            simulation.heard = partial(self.take, number)
            assert simulation.tiers is not None
            if self._places:
                first = self._places[0].simulation.tiers
                assert first is not None
                for copies, theirs in zip(simulation.tiers.of_ranks, first.of_ranks, strict=True):
                    copies.stores = theirs.stores
            self._places.append(Place(self, number, simulation))
        self._alive = list(range(len(self._places)))
        self._balancer = Balancer(len(self._places), setup.block_size)
        cores = [ReachedCore(place, place.send) for place in self._places]
        self._apart = PrefillApart(
            Roles(setup.prefill_cores, setup.prefill_threshold),
            cores,
            self._balancer,
            self._named,
            clock=lambda: self.now,
        )
        self._cores = cores
        self._open: set[str] = set()  # requests whose end was not reported
        self._aborted: set[str] = set()  # whose end clients do not wait for

    @property
    def num_steps(self) -> int:
        """The steps of all cores so far."""
        return sum(place.simulation.num_steps for place in self._places)

    @property
    def counts(self) -> dict[str, int]:
        """What prefills there were: sent, done, failed, aborted, given up."""
        return dict(self._apart._counts)

    def run(self) -> CaseOutcome:
        """Apply all events of the case, then run steps until all requests have ended."""
        events = deque(sorted(self.case.events, key=lambda event: event.at))
        for tick in range(self.case.num_ticks):
            while events and events[0].at == tick:
                self.happen(events.popleft())
            self._turn(is_draining=False)
        self._drain()
        trace = hashlib.blake2b(digest_size=16)
        for place in self._places:
            trace.update(place.simulation.digest.encode())
        simulations = [place.simulation for place in self._places]
        num_accepted = sum(each.clients.num_accepted for each in simulations)
        num_loaded = sum(each.tiers.copies.num_loaded for each in simulations if each.tiers)
        return CaseOutcome(self.num_steps, num_accepted, trace.hexdigest(), num_loaded=num_loaded)

    def happen(self, event: Event) -> None:
        """Apply one event."""
        match event:
            case Add():
                self._add(event)
            case Abort(request_ids=ids):
                self._abort(sorted(self._open) if ids is None else ids)
            case Kill(core=core, ticks=ticks):
                is_there = core in self._alive and self._places[core].ticks_to_notice < 0
                lives = [n for n in self._alive if self._places[n].ticks_to_notice < 0]
                if is_there and len(lives) > 1:
                    self._places[core].ticks_to_notice = ticks
            case Jump(seconds=seconds):
                self.now += seconds
                self._tell_all(event)
            case _:
                self._tell_all(event)

    def take(self, core: int, outputs: StepOutputs) -> None:
        """Note the outputs of a core, as the client of several cores does."""
        changes = self._places[core].changes.take()
        self._balancer.update(core, CacheNews(0, *changes, 0))
        batches = list(outputs.values())
        for batch in batches:
            for started in batch.started:
                self._balancer.start(batch.request_ids[started.index])
            for end in batch.finished:
                self._balancer.end(batch.request_ids[end.index])
        for batch in self._apart.take(batches):
            for end in batch.finished:
                name = batch.request_ids[end.index]
                known = self._open if name in self._open else self._aborted
                assert name in known, f"{name}: the end is reported twice"
                known.remove(name)
            assert not [name for name in batch.request_ids if name.endswith(SUFFIX)]

    # -- helpers

    def _add(self, event: Add) -> None:
        request = event.request
        if request.request_id in self._open | self._aborted:
            return
        core, sent = self._apart.choose(request)
        place = self._places[core]
        self._open.add(request.request_id)
        for name in (request.request_id, request.request_id + SUFFIX):
            for each in self._places:
                each.fails_at[name] = event.fails_at
        with self._named(core):
            place.send(partial(self._enter, core, sent))
        self._apart.tend()

    def _enter(self, core: int, request: AddRequest) -> None:
        try:
            self._places[core].add(request)
        except RequestError:
            self._open.discard(request.request_id)
            self._aborted.discard(request.request_id)
            self._balancer.end(request.request_id)
            self._apart.end(request.request_id)
            self._apart.tend()

    def _abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            core = self._balancer.core_of(name)
            if core is None:
                continue
            self._balancer.end(name)
            self._open.remove(name)
            self._aborted.add(name)
            with self._named(core):
                self._places[core].send(partial(self._places[core].abort, [name]))
            self._apart.end(name)
        self._apart.tend()

    def _tell_all(self, event: Event) -> None:
        for core in self._alive:
            self._places[core].inbox.append(partial(self._places[core].simulation.happen, event))

    def _turn(self, *, is_draining: bool) -> None:
        """Let a tick pass on all cores, in any order."""
        self.now += self.case.setup.tick
        self._rng.shuffle(order := list(self._alive))
        for core in order:
            place = self._places[core]
            if place.ticks_to_notice >= 0:
                place.ticks_to_notice -= 1
                if place.ticks_to_notice < 0:
                    place.ticks_to_notice = 0
                    self._lose(core)
                continue
            if is_draining or self._rng.random() < READS:
                place.read()
            if is_draining:
                place.simulation.step_or_wait()
            else:
                place.simulation.move()
        self._apart.tend()

    def _drain(self) -> None:
        for core in self._alive:
            if self._places[core].ticks_to_notice < 0:
                self._places[core].read()  # a pause may be among it
            self._places[core].simulation.scheduler.set_pause_state(PauseState.UNPAUSED)
        work = sum(
            live.req.max_total
            for core in self._alive
            for live in self._places[core].simulation.clients.live.values()
        )
        num_unread = sum(len(self._places[core].inbox) for core in self._alive)
        longest = self.case.setup.config.max_model_len
        bound = SLACK_ROUNDS + 40 * (work + 2 * longest * num_unread)
        while self._has_work:
            self._turn(is_draining=True)
            bound -= 1
            assert bound > 0, f"unfinished: {sorted(self._open)}"
        for core in self._alive:
            self._places[core].simulation.drain()
        self._check_over()

    @property
    def _has_work(self) -> bool:
        places = [self._places[core] for core in self._alive]
        dying = any(place.ticks_to_notice >= 0 for place in places)
        return dying or any(place.inbox or place.simulation.has_work for place in places)

    def _check_over(self) -> None:
        """Check that nothing is kept of ended requests."""
        apart = self._apart
        assert not self._open, f"no end was reported for {sorted(self._open)}"
        left = {
            "prefills": apart._prefills,
            "by content": apart._by_content,
            "waits": apart._waits,
            "due": apart._due,
            "to send": apart._to_send,
            "to abort": apart._to_abort,
            "calls": apart._calls,
            "loads": [load for load in self._balancer.loads if load],
            "coming": self._balancer.num_coming,
        }
        left = {name: value for name, value in left.items() if value}
        assert not left, f"prefill apart: kept at the end: {left}"

    def _lose(self, core: int) -> None:
        """Go on without a core that has died."""
        if core not in self._alive:
            return
        self._alive.remove(core)
        self._places[core].inbox.clear()
        self._open.difference_update(self._apart.lost(core, self._balancer.remove(core)))

    @contextmanager
    def _named(self, core: int) -> Iterator[None]:
        try:
            yield
        except EngineDeadError:
            self._lose(core)
