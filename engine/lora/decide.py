"""AdapterSlots: limits the LoRA adapters in use, and assigns them to slots of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.errors import ConfigError
from engine.lora.library import AdapterLibrary, Version
from engine.lora.sharing import OtherRanks
from engine.messages.requests import AddRequest
from engine.messages.stats import AdapterUse
from engine.messages.step import NO_ADAPTER, AdapterPart, StepPlan
from engine.sched.adapters import Place
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.step_state import Step

PATIENCE = 5.0  # seconds that a request waits for a slot while others join adapters in use
LOOK_SECONDS = 0.5  # between two looks at the queue for such a request


class AdapterSlots(Resource):
    """Limits the running requests to at most ``max_loras`` different adapters.

    A request waits outside the queue until its adapter is in the host's memory; it ends with an
    error if the adapter cannot be used. A waiting request whose adapter would exceed the limit is
    skipped, and later requests may start. Once one has waited ``PATIENCE`` seconds, the adapter
    that will be free first gets no more requests. Unused adapters stay in their slots until these
    are needed, least recently used first.
    """

    name = "adapter"
    needs = ("adapters",)
    serves = "adapter"

    def __init__(
        self,
        max_loras: int,
        library: AdapterLibrary | None = None,
        fits: Callable[[Collection[str]], bool] | None = None,
    ) -> None:
        """library: reads adapters; ``None``: all are there, as in a replay. fits: whether adapters
        fit into the device's memory together; ``None``: any ``max_loras`` adapters do."""
        if max_loras < 1:
            raise ConfigError(f"max_loras is {max_loras}, must be at least 1")
        self.max_loras = max_loras
        self.library = library
        self._fits = fits
        self._lacks_memory = False  # a request has waited for memory since the last step
        self.slot_of: dict[str, int] = {}  # slots of loaded adapters, least recently used first
        self.num_loads = 0  # into slots
        self._users: dict[str, set[str]] = {}  # adapter -> ids of running requests that use it
        self._versions: dict[str, Version] = {}  # of unfinished requests
        self._waiting: dict[Version, list[Request]] = {}  # until it is read
        self._since: dict[Version, float] = {}  # when a request began to wait for it, in seconds
        self._closing: str | None = None  # an adapter that gets no more requests for now
        self._look_at = 0.0  # when to look for requests that have waited long, in seconds
        self._part = AdapterPart()

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler
        scheduler.view.adapters = self

    def added(self, req: Request) -> None:
        version = None if self.library is None else self.library.arrived(req.request_id)
        if version is not None:
            self._versions[req.request_id] = version
            if req.adapter not in self.slot_of:
                self._await(req, version, req.arrival_time)

    def watches(self, req: Request) -> bool:
        """Always False: a running request keeps its adapter, so its steps need no check."""
        return False

    def begin_step(self, step: Step) -> None:
        self._make_way(self._scheduler.view.now)
        if self.library is None or not self._waiting:
            return
        self.library.sweep()
        view = self._scheduler.view
        self.library.hurry(is_alone=not (view.running or view.waiting))
        for version in [each for each in self._waiting if not self.library.is_coming(each)]:
            reqs = [req for req in self._waiting.pop(version) if not req.is_finished]
            seconds = self._scheduler.view.now - self._since.pop(version)
            if not version.fault:
                self._scheduler.view.cost.observe_read(max(0.0, seconds))
            for req in reqs:
                if version.digest and req.adapter != version.digest:
                    self._scheduler.name_adapter(req, version.digest)
                self._scheduler.wake(req.request_id)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        adapter = req.adapter
        if adapter is None:
            return Fit(num_tokens)
        if adapter in self._users:
            return Fit(0 if adapter == self._closing and req.is_waiting else num_tokens)
        version = self._versions.get(req.request_id)
        if version is None and self.library is not None:  # ``added`` has failed
            message = "the adapter is not known: send the request again"
            return Fit(0, message, OnRefuse.FAIL, code="adapter_failed")
        if version is not None and version.fault:
            message = f"the adapter cannot be used: {version.fault}"
            return Fit(0, message, OnRefuse.FAIL, code="adapter_failed")
        if adapter not in self.slot_of:
            if self.library is not None and version and not self._is_ready(req, version):
                return Fit(0, on_refuse=OnRefuse.PARK)
            if not self._has_free_slot():
                return Fit(0)
        if self._fits is not None and self._users and not self._fits([*self._users, adapter]):
            self._lacks_memory = True
            return Fit(0)
        return Fit(num_tokens)

    def seated(self, req: Request, step: Step) -> None:
        slot = NO_ADAPTER if req.adapter is None else self._use(req.adapter, req.request_id)
        self._part.used_by[req.slot] = slot

    def parked(self, req: Request) -> None:
        version = self._versions[req.request_id]
        if req not in self._waiting.get(version, ()):
            self._await(req, version, self._scheduler.view.now)

    def release(self, req: Request) -> None:
        if req.adapter is None:
            return
        users = self._users.get(req.adapter, set())
        users.discard(req.request_id)
        if not users:
            self._users.pop(req.adapter, None)
        if not req.is_finished:
            return
        version = self._versions.pop(req.request_id, None)
        if self.library is not None and version is not None:
            self.library.let_go(version)

    def describe(self, plan: StepPlan) -> None:
        if self._part.used_by:
            plan.adapters, self._part = self._part, AdapterPart()

    def counters(self) -> dict[str, int]:
        counts = {"num_slot_loads": self.num_loads}
        if self.library is not None:
            counts["num_read"] = self.library.num_read
            counts["num_failed_reads"] = self.library.num_failed
            counts["num_dropped"] = self.library.num_dropped
        return counts

    def share(self, group: OtherRanks) -> None:
        """Let the other ranks of a group keep the same adapters."""
        if self.library is not None:
            self.library.share(group)

    def shutdown(self) -> None:
        if self.library is not None:
            self.library.shutdown()

    # -- for policies, see ``AdapterPlaces``

    @property
    def num_slots(self) -> int:
        return self.max_loras

    @property
    def in_slots(self) -> Collection[str]:
        return self.slot_of.keys()

    @property
    def in_use(self) -> Collection[str]:
        return self._users.keys()

    def num_running(self, adapter: str) -> int:
        return len(self._users.get(adapter, ()))

    def place(self, adapter: str) -> Place:
        if adapter in self.slot_of:
            return "slot"
        return "host" if self.library is None or adapter in self.library.store else "disk"

    # -- for clients

    def resolved(self, request: AddRequest) -> AddRequest:
        """Replace the name of a new request's adapter, see ``AdapterLibrary.resolved``."""
        return request if self.library is None else self.library.resolved(request)

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that clients may call by name."""
        return {} if self.library is None else self.library.methods

    def use(self) -> AdapterUse:
        """Which adapters are in use, and how much memory they take."""
        running = {name for users in self._users.values() for name in users}
        names: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        for request_id, version in self._versions.items():
            names[request_id not in running][version.name] += 1
        store = None if self.library is None else self.library.store
        return AdapterUse(
            num_slots=self.max_loras,
            num_slots_used=len(self.slot_of),
            num_host_copies=0 if store is None else len(store),
            host_bytes=0 if store is None else store.num_bytes,
            running=dict(names[0]),
            waiting=dict(names[1]),
        )

    # -- helpers

    def _make_way(self, now: float) -> None:
        """Choose the adapter whose slot and memory should become free: if there is no other, and a
        request has waited long."""
        lacks_memory, self._lacks_memory = self._lacks_memory, False
        if self._closing not in self._users:
            self._closing = None
        if len(self._users) < self.max_loras and not lacks_memory:
            self._closing = None
            self._look_at = now
        elif self._closing is None and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for req in self._scheduler.view.waiting:
                is_late = now - req.arrival_time >= PATIENCE
                if is_late and req.adapter is not None and req.adapter not in self._users:
                    self._closing = self._free_soonest()
                    return

    def _free_soonest(self) -> str:
        """The adapter whose running requests have the fewest tokens left to generate."""
        most_left = dict.fromkeys(self._users, 0)
        for req in self._scheduler.view.running:
            if req.adapter in most_left:
                num_left = req.max_total - req.num_tokens
                most_left[req.adapter] = max(most_left[req.adapter], num_left)
        return min(most_left, key=lambda adapter: most_left[adapter])

    def _is_ready(self, req: Request, version: Version) -> bool:
        """True if the version is in the host's memory, and its digest names the request's
        adapter."""
        assert self.library is not None
        return req.adapter == version.digest and self.library.is_there(version)

    def _await(self, req: Request, version: Version, now: float) -> None:
        """Let a request wait until a version is read, and start to read it."""
        assert self.library is not None
        self.library.want(version)
        if version.fault or self._is_ready(req, version):
            return
        self._waiting.setdefault(version, []).append(req)
        self._since.setdefault(version, now)

    def _use(self, adapter: str, request_id: str) -> int:
        """Record that a request uses an adapter, and return the adapter's slot. If the adapter is
        not loaded, the worker loads it into a free slot before this step."""
        self._users.setdefault(adapter, set()).add(request_id)
        slot = self.slot_of.pop(adapter, NO_ADAPTER)
        if slot == NO_ADAPTER:
            slot = self._free_slot()
            self._part.load[slot] = adapter
            self.num_loads += 1
        self.slot_of[adapter] = slot
        if self.library is not None:
            self.library.use(adapter)
        return slot

    def _is_kept(self, adapter: str) -> bool:
        """True if an adapter must stay in its slot."""
        return adapter in self._users or (
            self.library is not None and self.library.is_pinned(adapter)
        )

    def _has_free_slot(self) -> bool:
        if len(self._users) >= self.max_loras:
            return False
        return len(self.slot_of) < self.max_loras or not all(map(self._is_kept, self.slot_of))

    def _free_slot(self) -> int:
        if len(self.slot_of) < self.max_loras:
            return len(self.slot_of)
        idle = next(adapter for adapter in self.slot_of if not self._is_kept(adapter))
        return self.slot_of.pop(idle)
