"""TierCopies: copies blocks between the KV pool and stores outside it, in the worker.

    before a step ──> blocks to store are copied to rows of bytes, which the thread of a store keeps
    loads ──> a thread reads rows from the store and copies them into blocks, while steps go on

Each store has a thread, so that a slow one holds up no other. Loads come before blocks to store."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from engine.config.decide import ModelFacts
from engine.config.engine import ResolvedConfig
from engine.config.model import ModelConfig
from engine.kv_transfer.opening import GIB, PlannedStores, namespace_of
from engine.kv_transfer.stores import BlockStore, Rows
from engine.kv_transfer.tiers import NOWHERE
from engine.messages.kv_orders import KVOrders, Loaded, LoadOrder
from engine.messages.step import StepPlan
from engine.worker.feature import Feature, Machine
from engine.worker.memory import pool_bytes, tensors_of
from engine.worker.slots import LiveSeqs

BATCH_BYTES = 16 << 20  # of blocks that are copied at once
MOST_PENDING = 256 << 20  # bytes that wait to be stored
MOST_FAULTS = 8  # in a row, after which a store is used no more

logger = logging.getLogger("engine.kv")


class Blocks:
    """Copies blocks of the pool to rows of bytes and back. ``pieces``: tensors [blocks, bytes]
    uint8 that together hold the content of each block."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self._pieces = list(pieces)
        self.num_bytes = sum(piece.shape[1] for piece in pieces)
        self._on_host = [p.numpy() if p.device.type == "cpu" else None for p in pieces]

    def read(self, blocks: Sequence[int]) -> Rows:
        """The contents of these blocks: [n, ``num_bytes``] uint8."""
        rows = np.empty((len(blocks), self.num_bytes), dtype=np.uint8)
        for part, piece, own in self._parts(rows):
            if own is None:
                index = torch.tensor(blocks, device=piece.device)
                part[:] = piece.index_select(0, index).cpu().numpy()
                continue
            for place, first, length in runs(blocks):
                part[place : place + length] = own[first : first + length]
        return rows

    def write(self, blocks: Sequence[int], rows: Rows) -> None:
        """Set the contents of these blocks."""
        for part, piece, own in self._parts(rows):
            if own is None:
                index = torch.tensor(blocks, device=piece.device)
                piece.index_copy_(0, index, torch.from_numpy(part).to(piece.device))
                continue
            for place, first, length in runs(blocks):
                own[first : first + length] = part[place : place + length]

    def _parts(self, rows: Rows) -> list[tuple[Rows, torch.Tensor, Rows | None]]:
        parts, begin = [], 0
        for piece, own in zip(self._pieces, self._on_host, strict=True):
            end = begin + piece.shape[1]
            parts.append((rows[:, begin:end], piece, own))
            begin = end
        return parts


def runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranges of consecutive blocks: index of the first one in ``blocks``, its number, length."""
    found = []
    for _, group in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        pairs = list(group)
        found.append((*pairs[0], len(pairs)))
    return found


class Write(NamedTuple):
    """Blocks that wait to be stored. ``epoch``: how often the store had been cleared."""

    keys: list[bytes]
    rows: Rows
    epoch: int


class Load(NamedTuple):
    """A part of a load order: what one store reads. ``places``: in the lists of the order."""

    order: LoadOrder
    places: list[int]


class StoreThread:
    """Calls a store in a thread. A store that raises is logged, and used no more after several
    errors in a row: requests then compute their tokens."""

    def __init__(self, store: BlockStore, fill: Callable[[Load, BlockStore], None]) -> None:
        """fill: reads what a load needs from the store, in the thread."""
        self.store = store
        self.is_used = True
        self.counts: Counter[str] = Counter()
        self._fill = fill
        self._epoch = 0
        self._num_faults = 0
        self._num_pending = 0  # bytes
        self._writes: deque[Write] = deque()
        self._loads: deque[Load] = deque()
        self._forgotten: set[bytes] = set()  # keys of pending writes that are not wanted any more
        self._wakened = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"kv store {store.name}", daemon=True
        )
        self._thread.start()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store answers; nothing if it fails."""
        if self.is_used:
            try:
                return list(self.store.contains(keys))
            except Exception as error:
                self._fault("contains", error)
        return [False] * len(keys)

    def add_writes(self, keys: list[bytes], rows: Rows) -> None:
        """Store blocks soon. If too many wait, these are not stored."""
        with self._wakened:
            if self._num_pending + rows.nbytes > MOST_PENDING:
                self.counts["skipped"] += len(keys)
                return
            self._num_pending += rows.nbytes
            self._writes.append(Write(keys, rows, self._epoch))
            self._wakened.notify()

    def add_load(self, load: Load) -> None:
        """Begin a load."""
        with self._wakened:
            self._loads.append(load)
            self._wakened.notify()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Never supply these blocks again."""
        with self._wakened:
            if self._writes:
                self._forgotten |= set(keys)
        self._call("forget", lambda: self.store.forget(keys))

    def clear(self) -> None:
        """Never supply any block again that was stored before, or that waits to be stored."""
        with self._wakened:
            self._epoch += 1
        self._call("clear", self.store.clear)

    def close(self, timeout: float) -> None:
        """Store what waits, and close the store. A store that takes longer is left alone."""
        with self._wakened:
            self._is_closed = True
            self._wakened.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("the KV store %s did not end in %g s", self.store.name, timeout)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, Load):
                self._call("read", partial(self._fill, work, self.store))
            else:
                self._call("write", partial(self._store, work))
                with self._wakened:
                    self._num_pending -= work.rows.nbytes
                    if not self._writes:
                        self._forgotten.clear()
        self._call("close", self.store.close)

    def _next(self) -> Load | Write | None:
        with self._wakened:
            while not (self._loads or self._writes or self._is_closed):
                self._wakened.wait()
            if self._loads:
                return self._loads.popleft()
            return self._writes.popleft() if self._writes else None

    def _store(self, write: Write) -> None:
        with self._wakened:
            if write.epoch != self._epoch:
                return
            wanted = [i for i, key in enumerate(write.keys) if key not in self._forgotten]
        keys = [write.keys[i] for i in wanted]
        rows = write.rows if len(wanted) == len(write.keys) else write.rows[wanted]
        if keys:
            self.counts["stored"] += sum(self.store.write(keys, rows))
        with self._wakened:
            gone = self._forgotten.intersection(keys)
            is_cleared = write.epoch != self._epoch
        if gone or is_cleared:  # meanwhile
            self.store.forget(keys if is_cleared else list(gone))

    def _call(self, name: str, call: Callable[[], object]) -> None:
        if not self.is_used and name != "close":
            return
        try:
            call()
            self._num_faults = 0
        except Exception as error:
            self._fault(name, error)

    def _fault(self, name: str, error: Exception) -> None:
        self.counts["errors"] += 1
        self._num_faults += 1
        logger.warning(
            "the KV store %s failed: %s raised %s: %s",
            *(self.store.name, name, type(error).__name__, error),
        )
        if self._num_faults == MOST_FAULTS:
            self.is_used = False
            logger.warning(
                "the KV store %s is not used any more after %d errors in a row; requests compute "
                "their tokens",
                *(self.store.name, MOST_FAULTS),
            )


class TierCopies(Feature):
    """The worker's half of KV tiers. It also answers which blocks stores have (``Outside``)."""

    part = "kv_transfer"
    waits_for_part = True

    def __init__(self, planned: PlannedStores) -> None:
        """planned: the stores to open, the fastest first."""
        self.planned = planned
        self._blocks: Blocks
        self._threads: list[StoreThread] = []
        self._planned: list[LoadOrder] = []
        self._reports: deque[Loaded] = deque()
        self._parts_left: dict[int, int] = {}  # by number of the load
        self._is_good: dict[int, np.ndarray] = {}
        self._begun: dict[int, float] = {}
        self._lock = threading.Lock()

    def attach(self, machine: Machine) -> None:
        self._machine, planned = machine, self.planned
        if planned.own_bytes and not planned.is_shared and machine.platform.shares_memory:
            logger.info(
                "kv_offloading_size: with one core on a CPU, these %.2f GiB are better given to "
                "the KV pool (kv_cache_memory_bytes), from which nothing must be copied",
                planned.own_bytes / GIB,
            )

    @property
    def own_bytes(self) -> int:
        return self.planned.own_bytes

    def open(
        self,
        num_blocks: int,
        config: ResolvedConfig,
        facts: ModelFacts,
        drafting: ModelConfig | None,
    ) -> None:
        """Open the stores, after all memory of the pool's ``num_blocks`` blocks is allocated.
        ``drafting``: the draft model. Raises ``ConfigError``."""
        pieces = [*pool_bytes(tensors_of(self._machine.kv), num_blocks)]
        for feature in self._machine.features:
            pieces += feature.block_memory(num_blocks)
        self._blocks = Blocks(pieces)
        namespace = namespace_of(config, facts, drafting)
        stores = self.planned.open(namespace, self._blocks.num_bytes)
        self._threads = [StoreThread(store, self._fill) for store in stores]

    @property
    def names(self) -> Sequence[str]:
        """The names of the stores."""
        return [thread.store.name for thread in self._threads]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The index of the first store that has a copy of each block, or ``NOWHERE``."""
        found = [NOWHERE] * len(keys)
        for index, thread in enumerate(self._threads):
            left = [i for i, store in enumerate(found) if store == NOWHERE]
            answers = thread.contains([keys[i] for i in left]) if left else []
            for i, has in zip(left, answers, strict=False):
                if has:
                    found[i] = index
        return found

    def take_reports(self) -> list[Loaded]:
        """The loads that have ended since the last call."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def counts(self) -> Mapping[str, int]:
        """Counters of all stores; a key is ``store.counter``."""
        counted: dict[str, int] = {}
        for thread in self._threads:
            each = dict(thread.counts)
            try:
                each |= thread.store.counts()
            except Exception:  # only counters are missing
                each["errors"] = each.get("errors", 0) + 1
            counted |= {f"{thread.store.name}.{name}": int(n) for name, n in each.items()}
        return counted

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        orders = plan.kv_transfer
        if not isinstance(orders, KVOrders):
            return None
        for thread in self._threads:
            if orders.clear:
                thread.clear()
            if orders.forget:
                thread.forget(orders.forget)
        if orders.store_keys:
            self._store(orders.store_keys, orders.store_blocks)
        self._planned += orders.loads
        return None

    def begin_loads(self) -> None:
        """Begin the loads of the newest plan. Its snapshots of states must have been read: a load
        may fill their blocks."""
        planned, self._planned = self._planned, []
        for order in planned:
            self._load(order)

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.close(timeout=10.0)
        self._threads = []

    # -- helpers

    def _store(self, keys: list[bytes], blocks: list[int]) -> None:
        """Copy blocks that a store lacks, and let it keep them."""
        lacking = {
            thread: [i for i, has in enumerate(thread.contains(keys)) if not has]
            for thread in self._threads
            if thread.is_used
        }
        copied = sorted({i for places in lacking.values() for i in places})
        size = max(1, BATCH_BYTES // self._blocks.num_bytes)
        for start in range(0, len(copied), size):
            places = copied[start : start + size]
            rows = self._blocks.read([blocks[i] for i in places])
            for thread, own in lacking.items():
                wanted = set(own)
                mine = [nth for nth, i in enumerate(places) if i in wanted]
                if mine:
                    part = rows if len(mine) == len(places) else rows[mine]
                    thread.add_writes([keys[places[nth]] for nth in mine], part)

    def _load(self, order: LoadOrder) -> None:
        by_store: dict[int, list[int]] = {}
        for place, store in enumerate(order.stores):
            by_store.setdefault(store, []).append(place)
        with self._lock:
            self._parts_left[order.number] = len(by_store)
            self._is_good[order.number] = np.zeros(len(order.keys), dtype=np.uint8)
            self._begun[order.number] = 0.0
        for store, places in by_store.items():
            thread = self._threads[store]
            if thread.is_used:
                thread.add_load(Load(order, places))
            else:
                self._end(order, 0.0)

    def _fill(self, load: Load, store: BlockStore) -> None:
        """Read what a load needs from one store. Runs in the thread of the store."""
        order, begun = load.order, time.perf_counter()
        size = max(1, BATCH_BYTES // self._blocks.num_bytes)
        try:
            for start in range(0, len(load.places), size):
                places = load.places[start : start + size]
                rows = np.empty((len(places), self._blocks.num_bytes), dtype=np.uint8)
                good = store.read([order.keys[i] for i in places], rows)
                nth = [n for n, is_good in enumerate(good[: len(places)]) if is_good is True]
                if not nth:
                    continue
                filled = [places[n] for n in nth]
                blocks = [order.blocks[i] for i in filled]
                self._blocks.write(blocks, rows if len(nth) == len(places) else rows[nth])
                first_state = len(order.keys) - order.num_states
                for feature in self._machine.features:
                    feature.filled(blocks, [i >= first_state for i in filled])
                self._is_good[order.number][filled] = 1
        finally:
            self._end(order, time.perf_counter() - begun)

    def _end(self, order: LoadOrder, seconds: float) -> None:
        """Note that one store has ended its part of a load."""
        number = order.number
        with self._lock:
            self._begun[number] = max(self._begun[number], seconds)
            self._parts_left[number] -= 1
            if self._parts_left[number]:
                return
            del self._parts_left[number]
            is_good, longest = self._is_good.pop(number), self._begun.pop(number)
        self._reports.append(Loaded(number, is_good.tobytes(), longest))


class TierLoads(Feature):
    """Begins the loads of a plan after all other features have begun the plan's step."""

    part = "kv_transfer"
    waits_for_part = True

    def __init__(self, copies: TierCopies) -> None:
        self._copies = copies

    def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
        self._copies.begin_loads()
        return None
