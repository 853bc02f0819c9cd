"""TierCopies: copies blocks between the KV pool and stores outside it, in the worker.

    before a step ──> blocks to store are copied to rows of bytes, which the thread of a store keeps
    loads ──> a thread reads rows from the store and copies them into blocks, while steps go on

Each store has a thread, so that a slow one holds up no other; some have further ones for loads.
Loads come before blocks to store.

A device computes prompts faster than the host keeps their blocks. So these may wait in a share of
the device's memory, and the host's pages are there before blocks are written to them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from engine.ipc.host_memory import free_host_bytes
from engine.kv_transfer.group_copies import ANNOUNCE, OPEN, methods_of
from engine.kv_transfer.opening import GIB, PlannedStores
from engine.kv_transfer.pool_blocks import PoolBlocks
from engine.kv_transfer.store_thread import BATCH_BYTES, Activity, Load, Loading, StoreThread
from engine.kv_transfer.stores import Rows
from engine.kv_transfer.tiers import NOWHERE
from engine.messages.kv_orders import KVOrders, Loaded, LoadOrder
from engine.messages.stats import StoreUse
from engine.messages.step import StepPlan, StepResult
from engine.worker.feature import Feature, Machine
from engine.worker.memory import PagePrefault, pool_bytes, tensors_of
from engine.worker.platform import Mark
from engine.worker.slots import LiveSeqs

GATHER_BYTES = 128 << 20  # of blocks that a device gathers at once: it takes some calls each time
PENDING_SHARE = 2  # at most 1 / this of the host's memory for blocks may wait to be stored there
DEVICE_SHARE = 4  # the same of a device's free memory, where they wait
MOST_SPARE = 0.1  # of a device's memory: other cores may not have taken theirs yet
PREFAULT_SHARE = 2  # the same of the host's free memory, for pages that are taken early
CLOSE_SECONDS = 1.5  # for all stores to keep what waits; the processes of cores end within 2

logger = logging.getLogger("engine.kv")


@dataclass(slots=True)
class Progress:
    """A load in progress. ``num_left``: stores that have not ended their part. ``is_good``: a byte
    for each block, 1 if it has been filled. ``after``: steps before this mark may use the former
    content of its blocks."""

    num_left: int
    is_good: np.ndarray
    after: Mark
    seconds: float = 0.0


class TierCopies(Feature):
    """The worker's half of KV tiers. It also answers which blocks stores have (``Outside``)."""

    part = "kv_transfer"
    waits_for_part = True
    device_attributes = ("_machine", "_blocks")

    def __init__(self, planned: PlannedStores) -> None:
        """planned: the stores to open, the fastest first."""
        self.planned = planned
        self._blocks: PoolBlocks
        self._activity = Activity()
        self._threads: list[StoreThread] = []
        self._helpers: list[list[StoreThread]] = []  # of each store, which only load
        self._planned: list[LoadOrder] = []
        self._reports: deque[Loaded] = deque()
        self._progress: dict[int, Progress] = {}  # by number of the load
        self._pages: PagePrefault | None = None
        self._num_skipped = 0  # blocks that could not be copied
        self._lock = threading.Lock()

    def attach(self, machine: Machine) -> None:
        self._machine, planned = machine, self.planned
        is_alone = planned.num_ranks == 1 and not planned.is_shared
        if planned.own_bytes and is_alone and machine.platform.shares_memory:
            logger.info(
                "kv_offloading_size: with one core on a CPU, these %.2f GiB are better given to "
                "the KV pool (kv_cache_memory_bytes), from which nothing must be copied",
                planned.own_bytes / GIB,
            )

    @property
    def own_bytes(self) -> int:
        return self.planned.own_bytes

    def open(self, num_blocks: int, namespace: str) -> None:
        """Open the stores for blocks of this namespace, after all memory of the pool's
        ``num_blocks`` blocks is allocated. Raises ``ConfigError``."""
        pieces = [*pool_bytes(tensors_of(self._machine.kv), num_blocks)]
        for feature in self._machine.features:
            pieces += feature.block_memory(num_blocks)
        self._blocks = PoolBlocks(pieces, self._machine.platform)
        block_bytes = self._blocks.num_bytes
        loading = Loading(block_bytes, self._blocks.rows, self._fill, self._end)
        burst = self._most_pending()
        for opened in self.planned.open(namespace, block_bytes):
            self._threads.append(
                StoreThread(
                    opened.store,
                    loading,
                    reads=opened.reads,
                    writes=opened.writes,
                    activity=self._activity if opened.paces_writes else None,
                    most_pending=0 if opened.memory is None else burst,
                )
            )
            self._helpers.append(
                [
                    StoreThread(opened.store, loading, writes=False, closes=False)
                    for _ in range(opened.num_threads - 1)
                ]
            )
            if opened.memory is not None and not self._machine.platform.shares_memory:
                most = free_host_bytes() // PREFAULT_SHARE
                self._pages = PagePrefault(([torch.from_numpy(opened.memory)], most))
                self._pages.start()
        if self.planned.rank == 0:
            logger.info(
                "copies of KV blocks (%.2f MiB each) are kept in: %s",
                self.planned.num_ranks * block_bytes / (1 << 20),
                ", ".join(self.names),
            )

    def announce(self, host: str, port: int, keys: Sequence[bytes]) -> None:
        """Expect blocks at another engine."""
        self.planned.announce(host, port, keys)

    @property
    def names(self) -> Sequence[str]:
        """The names of the stores."""
        return [thread.store.name for thread in self._threads]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The index of the first store that has a copy of each block, or ``NOWHERE``."""
        found = [NOWHERE] * len(keys)
        for index, thread in enumerate(self._threads):
            left = [i for i, store in enumerate(found) if store == NOWHERE]
            answers = thread.contains([keys[i] for i in left]) if left and thread.reads else []
            for i, has in zip(left, answers, strict=False):
                if has:
                    found[i] = index
        return found

    def step_ended(self) -> None:
        """Called after each step of the engine."""
        self._activity.in_step, self._activity.last = False, time.monotonic()

    def step_begun(self) -> None:
        """Called before each step of the engine: ends what waits for stores that hang."""
        self._activity.in_step = True
        for thread in self._all_threads():
            thread.check()

    def take_reports(self) -> list[Loaded]:
        """The loads that have ended since the last call. Called before each step."""
        self.step_begun()
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def counts(self) -> dict[str, int]:
        """Counters of all stores; a key is ``store.counter``."""
        counted = {"blocks_skipped": self._num_skipped} if self._num_skipped else {}
        found = [(thread.name, thread.counters()) for thread in self._threads]
        for helper in chain.from_iterable(self._helpers):
            found.append((helper.name, dict(helper.counts)))  # its thread may add some
        for store, counts in found:
            for name, count in counts.items():
                key = f"{store}.{name}"
                counted[key] = counted.get(key, 0) + count
        return counted

    def uses(self) -> dict[str, StoreUse]:
        """What each store has, by name."""
        return {thread.name: thread.use() for thread in self._threads}

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        orders = plan.kv_transfer
        if not isinstance(orders, KVOrders):
            return None
        for thread in self._threads:
            if orders.clear:
                thread.clear()
            if orders.forget:
                thread.forget(orders.forget)
        self._planned += orders.loads
        if orders.store_keys:
            try:
                self._store(orders.store_keys, orders.store_blocks)
            except torch.AcceleratorError:  # the device is lost, and with it every request
                raise
            except Exception as error:  # memory is short; the step does not need the copies
                self._num_skipped += len(orders.store_keys)
                logger.warning("KV blocks are not stored: %s: %s", type(error).__name__, error)
        return None

    def begin_loads(self) -> None:
        """Begin the loads of the newest plan. Its snapshots of states must have been read: a load
        may fill their blocks."""
        planned, self._planned = self._planned, []
        for order in planned:
            self._load(order)

    def shutdown(self) -> None:
        if self._pages is not None:
            self._pages.stop()
            self._pages = None
        threads, self._threads, self._helpers = self._all_threads(), [], []
        for thread in threads:
            thread.begin_close()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.end_close(max(0.0, until - time.monotonic()))
        super().shutdown()

    # -- helpers

    def _most_pending(self) -> int:
        """Bytes of blocks that may wait to be kept in the host's memory; 0: no more than for other
        stores, since steps on a CPU make the copies."""
        platform, planned = self._machine.platform, self.planned
        if platform.shares_memory:
            return 0
        free, total = platform.free_and_total()
        share = min(MOST_SPARE, 1 - planned.gpu_share)  # steps need the rest
        spare = min(free, int(total * share))
        own_bytes = planned.own_bytes // planned.num_ranks
        return min(own_bytes // PENDING_SHARE, spare // DEVICE_SHARE)

    def _all_threads(self) -> list[StoreThread]:
        return [*self._threads, *chain.from_iterable(self._helpers)]

    def _loader(self, store: int) -> StoreThread:
        """The thread of a store that begins a load soonest."""
        thread = self._threads[store]
        if not thread.is_used:
            return thread
        free = [each for each in (thread, *self._helpers[store]) if each.is_used]
        return min(free, key=lambda each: each.num_loads)

    def _store(self, keys: list[bytes], blocks: list[int]) -> None:
        """Copy blocks that a store lacks, and let it keep them."""
        lacking = {thread: set(thread.lacking(keys)) for thread in self._threads}
        copied = sorted({i for places in lacking.values() for i in places})
        size = max(1, BATCH_BYTES // self._blocks.num_bytes)
        is_far = not self._machine.platform.shares_memory
        num_read = size * (GATHER_BYTES // BATCH_BYTES) if is_far else size
        for start in range(0, len(copied), num_read):
            read = copied[start : start + num_read]
            home = self._blocks.read([blocks[i] for i in read])
            for begin in range(0, len(read), size):
                places = read[begin : begin + size]
                rows = partial(home, slice(begin, begin + len(places)))
                for thread, own in lacking.items():
                    mine = [nth for nth, i in enumerate(places) if i in own]
                    if mine:
                        part = rows if len(mine) == len(places) else partial(_some, rows, mine)
                        thread.add_writes([keys[places[nth]] for nth in mine], part)

    def _load(self, order: LoadOrder) -> None:
        by_store: dict[int, list[int]] = {}
        for place, store in enumerate(self._stores_of(order)):
            if store != NOWHERE:
                by_store.setdefault(store, []).append(place)
        is_good = np.zeros(len(order.keys), dtype=np.uint8)
        if not by_store:
            self._reports.append(Loaded(order.number, is_good.tobytes(), 0.0))
            return
        after = self._machine.platform.mark()
        with self._lock:
            self._progress[order.number] = Progress(len(by_store), is_good, after)
        for store, places in by_store.items():
            self._loader(store).add_load(Load(order, places))

    def _stores_of(self, order: LoadOrder) -> Sequence[int]:
        """The store of each block: of several ranks, each reads from the fastest that has its part,
        which may have gone since the order."""
        return order.stores if self.planned.num_ranks == 1 else self.find(order.keys)

    def _fill(self, order: LoadOrder, places: list[int], rows: Rows) -> None:
        """Copy rows into the blocks at these places of an order. Runs in the thread of a store."""
        progress, blocks = self._progress[order.number], [order.blocks[i] for i in places]
        self._blocks.write(blocks, rows, progress.after)
        first_state = len(order.keys) - order.num_states
        for feature in self._machine.features:
            feature.filled(blocks, [i >= first_state for i in places])
        progress.is_good[places] = 1

    def _end(self, load: Load, seconds: float) -> None:
        """Note that one store has ended its part of a load."""
        number = load.order.number
        with self._lock:
            progress = self._progress[number]
            progress.seconds = max(progress.seconds, seconds)
            progress.num_left -= 1
            if progress.num_left:
                return
            del self._progress[number]
        self._reports.append(Loaded(number, progress.is_good.tobytes(), progress.seconds))


def _some(rows: Callable[[], Rows], places: list[int]) -> Rows:
    return rows()[places]


class CopiesOfRank(Feature):
    """In a further rank, answers the core (``GroupCopies``), which cannot see its stores."""

    part = "kv_transfer"
    waits_for_part = True

    def __init__(self, copies: TierCopies) -> None:
        self._copies = copies

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        copies = self._copies
        return {**methods_of(copies), OPEN: copies.open, ANNOUNCE: copies.announce}

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        self._copies.step_begun()
        return None

    def report(self, result: StepResult) -> None:
        self._copies.step_ended()


class TierLoads(Feature):
    """Begins the loads of a plan after all other features have begun the plan's step."""

    part = "kv_transfer"
    waits_for_part = True

    def __init__(self, copies: TierCopies) -> None:
        self._copies = copies

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        self._copies.begin_loads()
        return None
