"""KV tiers in random cases: the engine's own resource, and a worker half with simulated stores.

A load writes the even positions of its blocks when it begins and the odd ones when it ends, so that
another write in between, or a read before the end, finds a wrong digest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from engine.kv_transfer.awaited import AWAIT_BLOCKS as AWAIT_BLOCKS
from engine.kv_transfer.group_copies import MergedCopies, methods_of
from engine.kv_transfer.tiers import NOWHERE, FailurePolicy, Tiers
from engine.messages.kv_orders import KVOrders, Loaded, LoadOrder
from engine.messages.stats import StoreUse
from engine.messages.step import StepPlan
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit
from engine.sched.step_state import Step
from policylab.verify.case import Setup
from policylab.verify.fake import RUBBISH, DigestWorker
from policylab.verify.needs import Answers, Need

PLAIN, SLOW, LOSSY, SMALL, DEAD, DYING, LIAR, LATE = (
    *("plain", "slow", "lossy", "small", "dead", "dying", "liar", "late"),
)
TARDY = "tardy"
STORES = (PLAIN, SLOW, LOSSY, SMALL, DEAD, DYING, LIAR, LATE, TARDY)
KINDS_OF_RANKS = (PLAIN, *STORES)
MOST_TARDY = 90  # ticks until a block is there; requests wait 64 for one that another core stores
MOST_TICKS = 24  # of a load, unless its store is dead
SMALL_SIZE = 5  # blocks
SPEEDS = (50.0, 5e3, 1e9)  # expected speeds of stores, in blocks a second


class FakeStore:
    """Keeps digests of blocks. ``kind``: ``SLOW`` takes long; ``LOSSY`` loses every third block
    that is read; ``SMALL`` has room for a few; ``DEAD`` ends no load, ``DYING`` none after the
    first ones; ``LIAR`` promises all keys; ``LATE`` promises what it has had once; ``TARDY``
    has a block only some time after it was written."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.blocks: dict[bytes, list[int]] = {}
        self._had: set[bytes] = set()
        self._num_reads = self._num_writes = 0
        self._coming: dict[bytes, tuple[int, list[int]]] = {}  # ticks until it is there, digests

    def contains(self, key: bytes) -> bool:
        """True if it has this block, or promises it."""
        return key in self.blocks or self.kind == LIAR or (self.kind == LATE and key in self._had)

    def read(self, key: bytes) -> list[int] | None:
        """The digests of a block; ``None`` if it is not there, or damaged."""
        self._num_reads += 1
        if self.kind == LOSSY and self._num_reads % 3 == 0:
            self.blocks.pop(key, None)
        return self.blocks.get(key)

    def write(self, key: bytes, digests: list[int]) -> None:
        """Keep a block."""
        if self.kind == SMALL and len(self.blocks) >= SMALL_SIZE:
            del self.blocks[next(iter(self.blocks))]
        self._num_writes += 1
        if self.kind == TARDY and key not in self.blocks:
            self._coming[key] = (1 + 7 * self._num_writes % MOST_TARDY, digests)
            return
        self.blocks[key] = digests
        self._had.add(key)

    def drop(self, key: bytes) -> None:
        """Keep a block no more."""
        self.blocks.pop(key, None)
        self._coming.pop(key, None)

    def clear(self) -> None:
        """Keep nothing."""
        self.blocks.clear()
        self._coming.clear()

    def invalidate(self) -> None:
        """What it has is wrong from now on."""
        self.blocks = {key: [RUBBISH] * len(kept) for key, kept in self.blocks.items()}
        self._coming.clear()

    def tick(self) -> None:
        """Let time pass."""
        coming, self._coming = self._coming, {}
        for key, (ticks, digests) in coming.items():
            if ticks > 1:
                self._coming[key] = (ticks - 1, digests)
            else:
                self.blocks[key] = digests

    def ticks(self, rng: Random) -> int | None:
        """How long a load takes; ``None``: for ever."""
        if self.kind == DEAD or (self.kind == DYING and self._num_reads > 8):
            return None
        return rng.randint(4, MOST_TICKS) if self.kind == SLOW else rng.randint(0, 4)


@dataclass(slots=True, eq=False)
class FakeLoad:
    """A load in progress. ``digests``: of each block, ``None`` for one that cannot be read.
    ``left``: ticks until it ends. ``is_hung``: it then ends without blocks."""

    order: LoadOrder
    digests: list[list[int] | None]
    left: int
    is_hung: bool


class FakeCopies:
    """The worker's half of KV tiers in one rank: carries out the orders of plans, in the order of
    plans. ``patience``: ticks after which a load ends whose store does not answer. ``is_alone``:
    other ranks have no copies, so a block is in the store of its order."""

    def __init__(
        self, kinds: Sequence[str], patience: int, seed: int, *, is_alone: bool = True
    ) -> None:
        self.kv: list[list[int]] = []  # KV of the worker
        self.names = tuple(kinds)
        self.stored: list[tuple[bytes, list[int]]] = []  # all that stores were given
        self.num_loaded = 0  # blocks
        self._patience = patience
        self._is_alone = is_alone
        self.stores = [FakeStore(kind) for kind in kinds]
        self._rng = Random(seed)
        self._planned: list[LoadOrder] = []
        self._loads: list[FakeLoad] = []
        self._reports: list[Loaded] = []

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The index of the first store that promises each block, or ``NOWHERE``."""
        stores = list(enumerate(self.stores))
        return [
            next((index for index, store in stores if store.contains(key)), NOWHERE) for key in keys
        ]

    def carry_out(self, plan: StepPlan) -> None:
        """Do what a plan orders before its step writes any block."""
        orders = plan.kv_transfer
        if not isinstance(orders, KVOrders):
            return
        for store in self.stores:
            if orders.clear:
                store.clear()
            for key in orders.forget:
                store.drop(key)
        for key, block in zip(orders.store_keys, orders.store_blocks, strict=True):
            self.stored.append((key, self.kv[block][:]))
            for store in self.stores:
                store.write(key, self.kv[block][:])
        self._planned += orders.loads

    def begin_loads(self) -> None:
        """Begin the loads of the newest plan, whose snapshots of states have been read."""
        for order in self._planned:
            places = order.stores if self._is_alone else self.find(order.keys)
            stores = [None if index == NOWHERE else self.stores[index] for index in places]
            digests = [
                None if store is None else store.read(key)
                for store, key in zip(stores, order.keys, strict=True)
            ]
            ends = [0 if store is None else store.ticks(self._rng) for store in stores]
            longest = max(each for each in (*ends, 0) if each is not None)
            is_hung = None in ends
            load = FakeLoad(order, digests, self._patience if is_hung else longest, is_hung)
            self._write(load, 0)
            if load.left == 0:
                self._end(load)
            else:
                self._loads.append(load)
        self._planned = []

    def tick(self) -> None:
        """Let time pass; some loads end."""
        for store in self.stores:
            store.tick()
        for load in self._loads:
            load.left -= 1
            if load.left == 0:
                self._end(load)
        self._loads = [load for load in self._loads if load.left]

    def take_reports(self) -> list[Loaded]:
        """The loads that have ended since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def step_ended(self) -> None:
        """Nothing to do."""

    def uses(self) -> dict[str, StoreUse]:
        """Nothing that is of interest."""
        return {}

    def invalidate(self) -> None:
        """The cache was reset: what stores have and loads bring is wrong from now on."""
        for store in self.stores:
            store.invalidate()
        for load in self._loads:
            load.digests = [kept and [RUBBISH] * len(kept) for kept in load.digests]

    def counts(self) -> dict[str, int]:
        """No counters."""
        return {}

    def _end(self, load: FakeLoad) -> None:
        if load.is_hung:
            load.digests = [None] * len(load.digests)
        else:
            self._write(load, 1)
        is_good = [digests is not None for digests in load.digests]
        self.num_loaded += sum(is_good)
        seconds = self._rng.choice((0.0, 1e-3, 0.1))
        self._reports.append(Loaded(load.order.number, bytes(is_good), seconds))

    def _write(self, load: FakeLoad, parity: int) -> None:
        """Write the even (``parity`` 0) or odd (1) positions; rubbish where a store has failed."""
        for block, digests in zip(load.order.blocks, load.digests, strict=True):
            cells = self.kv[block]
            for place in range(parity, len(cells), 2):
                cells[place] = RUBBISH if digests is None else digests[place]


class SimulatedTiers(Tiers, Need):
    """The engine's resource for KV tiers. ``amount``: see ``FakeCopies``, ``patience``. Each of
    several ranks has stores of its own, which have other faults."""

    name = "tiers"
    needs = ("kv_transfer",)

    def __init__(self, amount: int, answers: Answers, setup: Setup) -> None:
        Need.__init__(self, amount, answers)
        stores, seed, ranks = setup.stores, setup.seed, setup.ranks
        self.copies = FakeCopies(stores, amount, seed, is_alone=ranks == 1)
        self.of_ranks = [self.copies]
        for rank in range(1, ranks):
            kinds = Random(f"stores of {seed}, rank {rank}").choices(KINDS_OF_RANKS, k=len(stores))
            self.of_ranks.append(FakeCopies(kinds, amount, seed + rank, is_alone=False))
        self.call_others: Callable[..., list[Any]] = lambda name, *args: []
        self._merged = MergedCopies(self.copies, lambda *given: self.call_others(*given))
        self.may_fail = seed % 8 == 5  # requests end in error after a load that fails
        self._is_eager = seed % 4 > 0  # with few tokens, computing rarely takes longer
        speeds = [SPEEDS[(seed + index) % len(SPEEDS)] for index in range(len(stores))]
        policy: FailurePolicy = "fail" if self.may_fail else "recompute"
        self.loaded_for: Counter[str] = Counter()  # loads by request id
        self._num_withdrawn = 0
        self._begun: dict[int, tuple[int, str | None]] = {}  # by number of the load
        Tiers.__init__(self, self._merged, 1, speeds=speeds, failure_policy=policy)

    def connect(self, rank: int, worker: DigestWorker) -> None:
        """Let the worker of a rank carry out orders."""
        copies = self.of_ranks[rank]
        copies.kv, worker.answers = worker.kv, methods_of(copies)
        worker.carry_out, worker.begin_loads = copies.carry_out, copies.begin_loads

    @property
    def stored(self) -> list[tuple[bytes, list[int]]]:
        """All that the stores of all ranks were given."""
        return [each for copies in self.of_ranks for each in copies.stored]

    def invalidate(self) -> None:
        """The cache was reset: what stores have and loads bring is wrong from now on."""
        for copies in self.of_ranks:
            copies.invalidate()

    def attach(self, scheduler: AttachedScheduler) -> None:
        Need.attach(self, scheduler)
        Tiers.attach(self, scheduler)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        answer = super().fit(req, num_tokens, step)
        self.num_refusals += answer.num_tokens < num_tokens
        return answer

    def _pays(self, *sizes: Any) -> bool:
        return self._is_eager or super()._pays(*sizes)

    @property
    def is_loading(self) -> bool:
        """True while loads are in progress."""
        return bool(self._loads)

    def withdrawn(self, keys: Iterable[bytes]) -> None:
        super().withdrawn(keys)
        self._num_withdrawn += 1

    def parked(self, req: Request) -> None:
        hit, num_loads = self.scheduler.kv.lookup(req).num_tokens, self._loads.newest
        super().parked(req)
        number = self._loads.newest
        if number == num_loads:
            return
        self._begun[number] = self._num_withdrawn, req.adapter
        self.loaded_for[req.request_id] += 1
        load = self._loads.find(number)
        assert load is not None, "it has just begun"
        num_tokens = load.promotion.wanted.num_tokens - hit
        most = (req.add.kv_transfer_params or {}).get("max_load_tokens")
        assert most is None or num_tokens <= most, (
            f"tiers: {num_tokens} tokens are loaded for {req}"
        )

    def transferred(self, report: Loaded) -> None:
        load = self._loads.find(report.number)
        req = None if load is None else load.req
        super().transferred(report)
        begun = self._begun.pop(report.number, None)
        if load is None or req is None or 0 in report.is_good or load.promotion.is_void:
            return
        kv, wanted = self.scheduler.kv, load.promotion.wanted.num_tokens
        # A policy of snapshots may have dropped the one with which the hit was to end.
        if begun != (self._num_withdrawn, req.adapter) or kv.held(req) or kv.states is not None:
            return
        hit = kv.lookup(req).num_tokens
        assert hit >= wanted, f"tiers: {req} has {hit} cached tokens after a load, not {wanted}"

    def tick(self) -> None:
        for copies in self.of_ranks:
            copies.tick()
        reports = self._merged.take_reports()
        for report in [*reports, *reports[:1]]:  # one of them twice
            self.scheduler.transferred(report)

    def check(self, running: Iterable[Request]) -> None:
        refs, find = self.scheduler.kv.pool.num_refs, self.scheduler.kv.cache.hash_of
        for load in self._loads:
            shared = [b for b in load.promotion.blocks if refs[b] != 1 or find(b) is not None]
            assert not shared, f"tiers: blocks {shared} are loaded while others use them"
        started = [req for req in running if req.arrival in self._held]
        assert not started, f"tiers: blocks are held for {started}, which have started"

    def check_over(self) -> None:
        """Check that nothing is kept of ended requests and loads."""
        left = {**self._loads.kept, "found": self._found, "params": self._params}
        left |= {
            "held": self._held,
            "missed": self._missed,
            "begun": self._begun,
            "failed": self._failed,
            "awaited": self._awaited._waits,
            "ended on some ranks": self._merged.kept,
        }
        left = {name: value for name, value in left.items() if value}
        assert not left, f"tiers: kept at the end: {left}"
