"""Tiers: decides which blocks are loaded from stores outside the pool, and which are stored there.

    published in the prefix cache ──> once the steps that compute the content have succeeded, the
        blocks are stored before the next step (``TierCopies`` in the worker)
    a request could use copies of blocks, and to load them is faster than to compute their tokens
        ──> it is parked, free blocks are taken and loaded ──> published; the request is queued
            again and has a longer prefix hit
    a load fails, or takes too long ──> the request computes its tokens

What stores report comes by ``transferred`` and ``Outside.find``, which step logs record."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from math import inf
from typing import Literal, NamedTuple, Protocol

from engine.kv.manager import KVManager
from engine.kv.promotions import Promotion, Wanted
from engine.kv.tables import KVRequest
from engine.kv.tails import is_tail
from engine.kv_transfer.awaited import Awaited
from engine.kv_transfer.loads import Load, Loads
from engine.kv_transfer.params import TierParams, read_params
from engine.kv_transfer.remote import RemotePrefill, without_peers
from engine.messages.kv_orders import KVOrders, Loaded, LoadOrder
from engine.messages.requests import AddRequest
from engine.messages.step import StepPlan, StepResult
from engine.sched.predict.loads import NOT_LOADED, LoadChoice
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.roster import Cause
from engine.sched.step_state import Step

FailurePolicy = Literal["recompute", "fail"]

NOWHERE = -1
ANYTHING = TierParams()
MAX_SECONDS = 10.0  # that a request waits for a load
HELD_STEPS = 4  # in which a request whose blocks were loaded may start
MOST_LOADS = 2  # for a request that does not start after them: others take its place meanwhile
LOOK_EVERY = 8  # steps after which stores are searched again for a request that still waits
LEAST_SECONDS = 2e-4  # of a load, however small


class Outside(Protocol):
    """The stores, as the scheduler sees them."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the stores."""

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The index of the fastest store that has a copy of each block, or ``NOWHERE``."""

    def counts(self) -> Mapping[str, int]:
        """Counters of all stores; a key is ``store.counter``."""


class Found(NamedTuple):
    """Which stores have the blocks that a waiting request could use. ``step``, ``hit``: number of
    the step in which they were searched, and tokens of its prefix hit then. ``num_loads``: since
    it has waited."""

    stores: dict[bytes, int]
    step: float = 0
    hit: int = 0
    num_loads: int = 0


class Tiers(Resource):
    """Parks requests while blocks that they can use are loaded from stores."""

    name = "kv load"
    needs = ("kv_transfer",)
    on_refuse = OnRefuse.PARK

    def __init__(
        self,
        outside: Outside | None,
        block_bytes: int,
        *,
        speeds: Sequence[float],
        failure_policy: FailurePolicy = "recompute",
        remote: RemotePrefill | None = None,
    ) -> None:
        """outside: the stores; ``None`` in a replay, which loads what was recorded. block_bytes: of
        a block in all ranks. speeds: bytes per second that each store is expected to supply, until
        it was measured. failure_policy: after a load that fails or takes too long, a request
        computes its tokens, or (``"fail"``) ends in error. remote: for prompts that other engines
        compute, or that are computed for them."""
        self._outside = outside
        self._remote = remote
        self._block_bytes = block_bytes
        self._fails = failure_policy == "fail"
        self._found: dict[int, Found] = {}  # by arrival number of a request
        self._loads = Loads(block_bytes, speeds)
        self._params: dict[int, TierParams] = {}  # of requests that have some, by arrival number
        self._failed: dict[int, str] = {}  # why requests end in error, by arrival number
        self._orders = KVOrders()
        # Blocks that are not ordered to be stored yet: the step in which each was published, and
        # its key. Its content is known to be right when all steps up to this one have ended.
        self._fresh: dict[int, tuple[int, bytes]] = {}
        self._newest = self._ended = 0  # numbers of steps with tokens
        self._in_flight: deque[StepPlan] = deque()
        self._held: dict[int, tuple[int, Promotion]] = {}
        """What was loaded for requests that have not started since, by arrival number, and until
        which step it is kept from being evicted."""
        self._missed: list[Request] = []  # parked, but their blocks were evicted for others
        self._counts: Counter[str] = Counter()
        self._kv: KVManager
        self._awaited: Awaited

    @property
    def methods(self) -> dict[str, Callable[..., None]]:
        """What clients may call by name: ``stop_awaiting(request_ids)`` ends waits for blocks that
        will not come."""
        return {"stop_awaiting": lambda request_ids: self._awaited.stop(request_ids)}

    @property
    def num_stores(self) -> int:
        """Number of stores."""
        return self._loads.num_stores

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._kv.cache.followers.append(self)
        self._kv.keep_tails(self._certain)
        self._awaited = Awaited(self._kv, self._contains)

    # -- what happens in the prefix cache

    def published(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Note blocks to store. The newest step may compute their content."""
        step, fresh = self._scheduler.view.step.index, self._fresh
        if keys and is_tail(keys[0]):  # stored before the next step, which may overwrite it
            self._orders.store_keys += keys
            self._orders.store_blocks += blocks
            return
        for key, block in zip(keys, blocks, strict=True):
            fresh.pop(block, None)  # so that steps ascend
            fresh[block] = step, key

    def lost(self, keys: Iterable[bytes]) -> None:
        """Blocks that leave the pool are stored all the same if this has been ordered: before the
        next step, which may overwrite them."""

    def withdrawn(self, keys: Iterable[bytes]) -> None:
        gone = set(keys)
        for found in self._found.values():
            for key in gone & found.stores.keys():
                del found.stores[key]
        self._orders.withdraw(gone)
        self._loads.withdraw(gone)

    def cleared(self) -> None:
        self._fresh.clear()
        self._orders = KVOrders(loads=self._orders.loads, clear=True)
        self._found.clear()
        self._loads.clear()

    def _withhold(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Do not store blocks that have just been published."""
        for key, block in zip(keys, blocks, strict=True):
            if block in self._fresh and self._fresh[block][1] == key:
                del self._fresh[block]

    # -- hooks of the scheduler

    def objection(self, add: AddRequest) -> str | None:
        try:
            params = read_params(add.kv_transfer_params or {})
        except ValueError as error:
            return str(error)
        if self._remote is not None:
            return self._remote.objection(params.remote)
        return None if self._outside is None else without_peers(params.remote)

    def added(self, req: Request) -> None:
        self._awaited.add(req, self._scheduler.view.now)
        if given := req.add.kv_transfer_params:
            params = self._params[req.arrival] = read_params(given)
            if not params.store:
                self._kv.withhold(req, self._withhold)

    def watches(self, req: Request) -> bool:
        return False

    def begin_step(self, step: Step) -> None:
        self._order_stores()
        now = self._scheduler.view.now
        for load in self._loads:
            if load.is_awaited and now - load.begun > MAX_SECONDS:
                self._counts["too_slow"] += 1
                self._end_wait(load, f"it took more than {MAX_SECONDS:g} s")
        for arrival in [each for each, (until, _) in self._held.items() if step.index > until]:
            self._let_go(arrival)
            found = self._found.get(arrival)
            if found is not None and found.num_loads < MOST_LOADS:
                self._found[arrival] = found._replace(step=0)  # it may load again when it can start
        missed, self._missed = self._missed, []
        for req in missed:
            self._scheduler.wake(req.request_id)
        self._end_lookups(step)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if self._remote is not None and (params := self._params.get(req.arrival)) is not None:
            keys = partial(self._kv.outside_keys, req)
            self._remote.expect(req.arrival, req.add.adapter, params.remote, keys)
        if req in self._awaited:
            return Fit(0, "kv lookup")
        if not req.is_waiting or self._kv.held(req):
            return Fit(num_tokens)
        if why := self._failed.get(req.arrival):
            message = f"its KV could not be loaded: {why}"
            return Fit(0, message, OnRefuse.FAIL, code="kv_transfer_failed")
        kv = self._kv
        if step.short and req.arrival in self._held and not kv.missing(req, req.num_tokens):
            # Running requests lack blocks, and what is held for this one can soon be theirs.
            return Fit(0, Cause.BLOCKS, OnRefuse.CLOSE)
        if kv.whole_blocks_for(req.num_tokens) > kv.num_usable:
            return Fit(num_tokens)  # it has no room at once, but in chunks that leave their windows
        wanted = self._wanted(req)
        if wanted is None:
            return Fit(num_tokens)
        if self._loads.coming_for(req, wanted) is not None:
            return Fit(0)
        return Fit(0, room=req.num_tokens)

    def parked(self, req: Request) -> None:
        if req in self._awaited:
            self._awaited.park(req)
            return
        found, num_loads = self._found[req.arrival].stores, self._found[req.arrival].num_loads
        wanted = self._choose(req, found)
        if (coming := self._loads.coming_for(req, wanted)) is not None:
            self._loads.join(req, coming)
            return
        # It computes what the load does not bring.
        self._found[req.arrival] = Found({}, inf, num_loads=num_loads + 1)
        if not wanted.keys or not self._kv.can_promote(wanted):
            self._missed.append(req)
            return
        stores = [found[key] for key in wanted.keys]
        promotion = self._kv.promote(wanted)
        number = self._loads.begin(promotion, req, self._scheduler.view.now, stores)
        self._orders.loads.append(
            LoadOrder(number, wanted.keys, promotion.blocks, stores, wanted.num_snapshot_keys)
        )

    def seated(self, req: Request, step: Step) -> None:
        self._let_go(req.arrival)
        if self._is_sent(req):  # stores may have dropped what the pool still has
            self.published(*self._kv.cached_blocks(req))

    def transferred(self, report: Loaded) -> None:
        load = self._loads.end(report.number)
        if load is None:
            return
        keys = load.promotion.wanted.keys
        good = [
            bool(is_good) and key not in load.withdrawn
            for key, is_good in zip(keys, report.is_good, strict=True)
        ]
        self._kv.promoted(load.promotion, good)
        if load.req is None or load.req.slot >= 0:  # it may have been woken before
            self._kv.end_promotion(load.promotion)
        else:
            until = self._scheduler.view.step.index + HELD_STEPS
            self._let_go(load.req.arrival)  # what it had loaded before the cache was emptied
            self._held[load.req.arrival] = until, load.promotion
        if all(good):
            self._loads.measure(load, report.seconds)
        self._counts["loads"] += 1
        self._counts["blocks_loaded"] += sum(good)
        num_missing = report.is_good.count(0)
        self._counts["blocks_failed"] += num_missing
        self._count_load(load, good)
        stores = ", ".join(map(self._name_of, load.bytes_by_store))
        failure = f"{stores} did not supply {num_missing} of {len(keys)} blocks"
        self._end_wait(load, failure if num_missing else "")

    def release(self, req: Request) -> None:
        self._found.pop(req.arrival, None)
        self._let_go(req.arrival)
        self._loads.released(req)
        if req.is_finished:
            if self._remote is not None:
                self._end_remote(self._remote, req)
            self._awaited.end(req)
            self._failed.pop(req.arrival, None)
            self._params.pop(req.arrival, None)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        self._ended = plan.step
        while self._in_flight and self._in_flight[0].step <= plan.step:
            self._in_flight.popleft()

    def describe(self, plan: StepPlan) -> None:
        if plan.num_tokens:
            self._newest = plan.step
            self._in_flight.append(plan)
        if self._orders:
            plan.kv_transfer = self._orders
            self._counts["blocks_stored"] += len(self._orders.store_keys)
            self._orders = KVOrders()

    def counters(self) -> dict[str, int]:
        of_stores = {} if self._outside is None else self._outside.counts()
        return dict(self._counts) | dict(of_stores)

    # -- helpers

    def _name_of(self, store: int) -> str:
        return "?" if self._outside is None else self._outside.names[store]

    def _count_load(self, load: Load, good: Sequence[bool]) -> None:
        """Count for each store what it has supplied."""
        for store, num in Counter(compress(load.stores, good)).items():
            self._counts[f"{self._name_of(store)}.blocks_loaded"] += num
            self._counts[f"{self._name_of(store)}.bytes_loaded"] += num * self._block_bytes
        for store in load.bytes_by_store:
            self._counts[f"{self._name_of(store)}.loads"] += 1

    def _count_hits(self, stores: Sequence[int]) -> None:
        """Count the blocks that a request could use and that a store has, or none has."""
        for store, num in Counter(stores).items():
            name = "misses" if store == NOWHERE else f"{self._name_of(store)}.hits"
            self._counts[name] += num

    def _is_sent(self, req: Request) -> bool:
        """True if another engine will continue the request."""
        params = self._params.get(req.arrival)
        return params is not None and params.remote.sends

    def _end_remote(self, remote: RemotePrefill, req: Request) -> None:
        """Note the end of a request, and tell its client where its blocks are."""
        remote.end(req.arrival)
        if self._is_sent(req) and len(req.tokens) > req.num_prompt:
            num_blocks = req.num_prompt // self._kv.block_size
            req.history.kv_transfer_params = remote.answer(req.request_id, num_blocks)

    def _certain(self, req: KVRequest) -> int:
        """How many of a request's first tokens have KV that no step in flight writes."""
        certain = [req.num_computed]
        for plan in self._in_flight:
            certain += plan.starts[plan.rows == req.row].tolist()
        return min(certain)

    def _order_stores(self) -> None:
        """Order to store the blocks whose content is known to be right."""
        fresh, orders, kv = self._fresh, self._orders, self._kv
        upto = self._ended if self._ended < self._newest else self._scheduler.view.step.index
        while fresh:
            block = next(iter(fresh))
            step, key = fresh[block]
            if step > upto:
                return
            del fresh[block]
            # Other keys mark blocks that a step is still to write.
            if kv.is_content(key) and kv.cache.hash_of(block) == key:
                orders.store_keys.append(key)
                orders.store_blocks.append(block)

    def _end_lookups(self, step: Step) -> None:
        """Let requests go on whose blocks have come, or whose time to wait for them is over."""
        view = self._scheduler.view
        if self._outside is None:
            over = self._awaited.recorded(
                lambda name: view.loads.expected(step.index, name) is not None
            )
        else:
            ended = self._awaited.over(view.now)
            over = [req for req, _ in ended]
            for req, has_come in ended:
                self._counts["awaited" if has_come else "awaited_in_vain"] += 1
                view.loads.made.append(LoadChoice(step.index, req.request_id, b""))
        for req in over:
            if self._awaited.end(req):
                self._scheduler.wake(req.request_id)

    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        stores = [] if self._outside is None else self._outside.find(keys)
        return [store != NOWHERE for store in stores]

    def _let_go(self, arrival: int) -> None:
        """Free what was loaded for a request that has started, or still waits."""
        if (held := self._held.pop(arrival, None)) is not None:
            self._kv.end_promotion(held[1])

    def _end_wait(self, load: Load, failure: str = "") -> None:
        """Let the requests that wait for a load go on. ``failure``: what it lacked."""
        req, others = self._loads.end_wait(load)
        if req is not None:
            if failure and self._fails and not load.promotion.is_void:
                self._failed[req.arrival] = failure
            self._scheduler.wake(req.request_id)
        for other in others:
            self._scheduler.wake(other.request_id)

    def _wanted(self, req: Request) -> Wanted | None:
        """What to load for a request; ``None`` if computing is faster or nothing is found."""
        if self._outside is None:
            return self._recorded(req)
        hit = self._kv.lookup(req).num_tokens
        found = self._find(req, hit)
        if not found:
            return None
        wanted = self._choose(req, found)
        num_bytes = self._loads.bytes_by_store([found[key] for key in wanted.keys])
        saved = wanted.num_tokens - hit
        if saved <= 0 or not self._pays(saved, hit, num_bytes):
            return None
        self._note_choice(req, found, wanted)
        return wanted

    def _choose(self, req: Request, found: dict[bytes, int]) -> Wanted:
        """What to load of the blocks that were found, within the request's own limit."""
        most = self._params.get(req.arrival, ANYTHING).max_load_tokens
        upto = None if most is None else self._kv.lookup(req).num_tokens + most
        return self._kv.wanted(req, found, upto)

    def _note_choice(self, req: Request, found: dict[bytes, int], wanted: Wanted) -> None:
        """Note for a step log what a request would load in this step."""
        view, loaded = self._scheduler.view, set(wanted.keys)
        made = view.loads.made
        if made and made[-1][:2] == (view.step.index, req.request_id) and made[-1].stores:
            return
        keys = self._kv.outside_keys(req)
        stores = bytes(found[key] if key in loaded else NOT_LOADED for key in keys)
        made.append(LoadChoice(view.step.index, req.request_id, stores))

    def _recorded(self, req: Request) -> Wanted | None:
        """What was loaded for a request in this step of a recorded run."""
        view = self._scheduler.view
        choice = view.loads.expected(view.step.index, req.request_id)
        if choice is None or not choice.stores:
            return None
        pairs = zip(self._kv.outside_keys(req), choice.stores, strict=False)
        found = {key: store for key, store in pairs if store != NOT_LOADED}
        self._found[req.arrival] = Found(found)
        return self._kv.wanted(req, found)

    def _find(self, req: Request, hit: int) -> dict[bytes, int]:
        """The store of each block outside the pool that a request could use after its prefix hit of
        ``hit`` tokens."""
        found, step = self._found.get(req.arrival), self._scheduler.view.step.index
        if found is None or hit < found.hit or step - found.step >= LOOK_EVERY:
            num_loads = 0 if found is None else found.num_loads
            keys = self._kv.outside_keys(req)
            stores = self._outside.find(keys) if keys and self._outside is not None else []
            if found is None:
                self._count_hits(stores)
            pairs = zip(keys, stores, strict=True)
            known = {key: store for key, store in pairs if store != NOWHERE}
            found = self._found[req.arrival] = Found(known, step, hit, num_loads)
        return found.stores

    def _pays(self, num_tokens: int, context: int, num_bytes: dict[int, int]) -> bool:
        """True if loading this many tokens after ``context`` delays requests less, in sum, than
        computing them: a load delays only its own request, a longer step all that run."""
        view = self._scheduler.view
        if not view.last.seconds:  # no step was measured, but computing takes longer on most hosts
            return True
        seconds = LEAST_SECONDS + self._loads.seconds_for(num_bytes)
        all_of_it = view.cost.prefill_seconds(num_tokens + 1, context)
        saved = all_of_it - view.cost.prefill_seconds(1, context + num_tokens)
        return seconds < saved * (1 + len(view.running))
