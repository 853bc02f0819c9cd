"""LoRA adapters in random cases: the engine's own slots and library, with a disk that is slow,
fails, and whose files change.

An adapter's content is a text. Its digest is that text, which begins with the adapter's path. A
content that ends with ``BROKEN`` cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from engine.errors import ConfigError, RequestError
from engine.lora.decide import AdapterSlots
from engine.lora.library import AdapterLibrary
from engine.lora.loading import Order
from engine.lora.store import AdapterStore
from engine.messages.requests import AddRequest
from engine.messages.step import NO_ADAPTER, StepPlan
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit
from engine.sched.step_state import Step
from policylab.verify.fake import mix
from policylab.verify.needs import Answers, Need

BROKEN = "!"
MOST_TICKS = 12  # that a reading takes


class ContentCopy(NamedTuple):
    """An adapter in the host's memory."""

    digest: str
    rank: int = 1
    num_bytes: int = 1


@dataclass(eq=False)
class DiskReading:
    """The reading of one order; it finds what the path has when it ends."""

    disk: Disk
    order: Order
    ready_at: int  # in ticks of the disk
    content: str = ""

    def poll(self) -> ContentCopy | None:
        if self.disk.now < self.ready_at:
            return None
        self.content = self.content or self.disk.contents[self.order.path]
        given = self.disk.given.setdefault(id(self.order), [])
        given.append(self.content)
        if self.content != given[0]:
            self.disk.changed.add(self.order.name)
        if self.content.endswith(BROKEN):
            raise ConfigError(f"{self.order.path} is broken")
        return ContentCopy(self.content)

    def wait(self) -> None:
        self.ready_at = self.disk.now

    def hurry(self, is_alone: bool) -> None:
        """Reading takes as many ticks in any case."""


class Disk:
    """An ``AdapterReader`` whose readings end after a number of ticks."""

    def __init__(self) -> None:
        self.now = 0
        self.contents: dict[str, str] = {}  # by path
        self.given: dict[int, list[str]] = {}  # by id of an order: what was read
        self.changed: set[str] = set()  # names of adapters that were read again, with other files
        self._orders: list[Order] = []  # so that ids are not used again
        self._num = count()

    def submit(self, order: Order) -> DiskReading:
        self._orders.append(order)
        self.contents.setdefault(order.path, f"{order.path}0")
        return DiskReading(self, order, self.now + mix(next(self._num), 3) % (MOST_TICKS + 1))

    def shutdown(self) -> None:
        """Nothing to release."""


@dataclass
class ClientLoad:
    """An adapter that a client loads: ``name`` gets it when it has been read."""

    name: str
    path: str
    ticket: str


@dataclass
class DeviceSlots:
    """What the worker has in its adapter slots, as plans say."""

    contents: dict[int, str] = field(default_factory=dict)  # by adapter slot
    used_by: dict[int, int] = field(default_factory=dict)  # worker slot -> adapter slot

    def planned(self, plan: StepPlan, store: AdapterStore[ContentCopy]) -> None:
        """Apply a new plan. Raises ``AssertionError`` if it loads into a slot in use, or loads what
        is not in the host's memory."""
        for worker_slot in plan.freed_slots:
            self.used_by.pop(worker_slot, None)
        if plan.adapters is None:
            return
        for slot, digest in plan.adapters.load.items():
            users = [user for user, used in self.used_by.items() if used == slot]
            assert not users, f"adapter slot {slot} is loaded while {users} use it"
            assert digest in store, f"adapter {digest!r} is loaded, but not in the host's memory"
            self.contents[slot] = store.take(digest).digest
        self.used_by.update(plan.adapters.used_by)

    def content(self, worker_slot: int) -> str | None:
        """The adapter with which the sequence in this slot of the worker runs."""
        slot = self.used_by.get(worker_slot, NO_ADAPTER)
        return None if slot == NO_ADAPTER else self.contents[slot]


class Adapters(AdapterSlots, Need):
    """The engine's adapter slots, ``amount`` of them, and a library that reads from a ``Disk``."""

    name = "adapters"

    def __init__(self, amount: int, answers: Answers) -> None:
        Need.__init__(self, amount, answers)
        self.disk = Disk()
        self.device = DeviceSlots()
        self._copies: AdapterStore[ContentCopy] = AdapterStore(amount + 1)
        library = AdapterLibrary(self.disk, self._copies, most_pinned=0)
        AdapterSlots.__init__(self, amount, library)
        self._library = library
        self._orders: dict[str, Order] = {}  # by request id
        self._put: dict[str, str] = {}  # names that certainly have this content
        self._loads: list[ClientLoad] = []
        self._wanted: str | None = None  # the content that the arriving request must use
        self._bound: dict[str, str] = {}  # the same for requests that were accepted, by id
        self._num_loads = count()

    def attach(self, scheduler: AttachedScheduler) -> None:
        Need.attach(self, scheduler)
        AdapterSlots.attach(self, scheduler)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        answer = super().fit(req, num_tokens, step)
        self.num_refusals += answer.num_tokens < num_tokens
        return answer

    def added(self, req: Request) -> None:
        super().added(req)
        self._bound.pop(req.request_id, None)
        self._orders.pop(req.request_id, None)
        version = self._versions.get(req.request_id)
        if version is not None:
            self._orders[req.request_id] = version.order
        if self._wanted is not None:
            self._bound[req.request_id] = self._wanted

    # -- events

    def write(self, path: str, content: str) -> None:
        """Replace the files at a path."""
        self.disk.contents[path] = content

    def load(self, name: str, path: str, *, replaces: bool) -> None:
        """A client begins to load an adapter. It is refused exactly if the name has one and may not
        be replaced."""
        ticket = str(next(self._num_loads))
        try:
            self._library.read(ticket, name, 0, path, replaces)
        except RequestError as error:
            assert not replaces, f"the load of {name!r} is refused: {error}"
        else:
            assert replaces or name not in self._put, f"{name!r} is loaded twice"
            self._loads.append(ClientLoad(name, path, ticket))

    def unload(self, name: str) -> None:
        """A client unloads an adapter."""
        found = self._library.remove(name)
        assert found is not None or name not in self._put, f"{name!r} was loaded, but is unknown"
        self._put.pop(name, None)

    def tick(self) -> None:
        self.disk.now += 1
        self._loads = [load for load in self._loads if not self._has_ended(load)]

    def _has_ended(self, load: ClientLoad) -> bool:
        try:
            digest = self._library.state(load.ticket)
        except ConfigError:
            return True
        if digest is None:
            return False
        try:
            info = self._library.put(load.ticket, load.name, 0, load.path, digest)
        except RequestError:  # another load of that name was faster
            return True
        assert info["digest"] == digest, f"{load.name!r} was read as {digest!r}, but is {info}"
        if load.name not in vars(self._library)["_next"]:  # what a request replaces comes later
            self._put[load.name] = digest
        return True

    def planned(self, plan: StepPlan) -> None:
        """Apply a new plan to the slots of the device."""
        self.device.planned(plan, self._copies)

    # -- requests

    def chosen(self, request: AddRequest) -> AddRequest | None:
        """The request with its adapter's identity in place of the name; ``None`` if it is refused,
        as it must be exactly if its adapter is unknown and has no path."""
        name, source = request.adapter, request.adapter_source
        for changed in self.disk.changed:  # the library goes on with the new files
            self._put.pop(changed, None)
        self.disk.changed.clear()
        has_path = source is not None and bool(source.path)
        try:
            found = self.resolved(request)
        except RequestError as error:
            assert not has_path, f"{request.request_id}: {error}"
            assert name not in self._put, f"{request.request_id}: {name!r} is loaded, but {error}"
            return None
        self._wanted = None
        if name is not None and source is not None and source.replaces:
            self._put.pop(name, None)  # it changes when this request's files have been read
        elif name is not None:
            self._wanted = self._put.get(name)
        return found

    def started(self, request_id: str, worker_slot: int) -> str | None:
        """The content with which a request starts to run. Raises ``AssertionError`` if it is not
        that of the request's version, was not read from its path, or is not what the name had when
        the request was sent."""
        content, version = self.device.content(worker_slot), self._versions.get(request_id)
        digest = None if version is None else version.digest
        text = f"{request_id}: runs with adapter {content!r}"
        assert content == digest, f"{text}, its version is {digest!r}"
        if version is not None:
            read = self.disk.given[id(version.order)]
            assert content in read, f"{text}, but {read} were read"
        wanted = self._bound.get(request_id, content)
        assert content == wanted, f"{text}, it was sent for {wanted!r}"
        return content

    def may_fail(self, request_id: str) -> bool:
        """True if an adapter's request may end with an error: its files were broken, or changed
        before they were read again, or the hook failed that should remember it."""
        order = self._orders.get(request_id)
        if order is None:
            return True
        read = self.disk.given.get(id(order), [])
        return any(each.endswith(BROKEN) for each in read) or len(set(read)) > 1

    # -- checks

    @property
    def is_reading(self) -> bool:
        """True while requests wait for adapters, or clients load some."""
        return bool(self._waiting or self._loads)

    def check(self, running: Iterable[Request]) -> None:
        users: dict[str, set[str]] = {}
        for req in running:
            if req.adapter is not None:
                users.setdefault(req.adapter, set()).add(req.request_id)
        assert users == self._users, f"adapters: {self._users} are taken, but {users} run"
        assert len(users) <= self.amount, f"adapters: {len(users)} are in use"
        slots = list(self.slot_of.values())
        assert len(set(slots)) == len(slots) <= self.amount, f"adapters are in slots {slots}"
        assert users.keys() <= self.slot_of.keys(), f"{users} run, {self.slot_of} are loaded"

    @property
    def counts(self) -> tuple[int, int]:
        """Loads into slots, and adapters that could not be read."""
        return self.num_loads, self._library.num_failed

    def check_over(self) -> None:
        """Check that nothing is kept of ended requests."""
        kept = {"users": self._users, "versions": self._versions, "waiting": self._waiting}
        kept |= {"since": self._since, "needed": vars(self._library)["_needed"]}
        left = {name: value for name, value in kept.items() if value}
        assert not left, f"adapters: kept of ended requests: {left}"
