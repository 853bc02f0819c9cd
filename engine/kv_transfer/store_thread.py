"""StoreThread: calls a store of KV blocks in a thread, so that it can hold up nothing else.

a call raises, or its answer is wrong ──> logged and counted; what it should have supplied is
                                          computed
several faults of a method in a row ────> the store is used no more
a call takes too long ──────────────────> what waits for the store ends without its blocks, and
                                          the store is not used until the call returns
blocks cannot be withdrawn ─────────────> the store is used no more: it might supply them"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np

from engine.kv_transfer.stores import BlockStore, Rows
from engine.messages.kv_orders import LoadOrder
from engine.messages.stats import StoreUse

BATCH_BYTES = 16 << 20  # of blocks that are copied at once
MOST_PENDING = 256 << 20  # bytes that wait to be stored, unless the caller has more room
MOST_PACED = 128 << 20  # the same, where writes leave the engine its processors
MOST_FAULTS = 8  # of a method in a row, after which a store is used no more
BUSY_SHARE = 0.01  # of the time, that writes may take while the engine computes
IDLE_SECONDS = 0.1  # without a step, after which the engine is idle
LOOK_SECONDS = 0.05  # between two looks whether it is
MOST_SECONDS = 5.0  # of a call in the thread, after which nothing waits for it any longer
MOST_FIND_SECONDS = 1.0  # of ``contains``, for which steps wait
HELD = ("num_blocks", "num_bytes")  # names of counts that are no counters
SLOW, PROMISED = "slow", "promised"  # kinds of faults of calls that have not failed

logger = logging.getLogger("engine.kv")


class Write(NamedTuple):
    """Blocks that wait to be stored. ``rows``: waits until their content is on the host, and
    returns it. ``epoch``: how often the store had been cleared."""

    keys: list[bytes]
    rows: Callable[[], Rows]
    num_bytes: int
    epoch: int


@dataclass(slots=True, eq=False)
class Load:
    """A part of a load order: what one store reads. ``places``: in the lists of the order.
    ``is_ended``: its blocks are filled, or may belong to others again."""

    order: LoadOrder
    places: list[int]
    is_ended: bool = False


class Loading(NamedTuple):
    """What a thread needs for loads. ``block_bytes``: of a block. ``rows``: makes rows for this
    many blocks. ``fill``: copies rows into the blocks at these places of an order. ``ended``: a
    load has ended after this many seconds of reading."""

    block_bytes: int
    rows: Callable[[int], Rows]
    fill: Callable[[LoadOrder, list[int], Rows], None]
    ended: Callable[[Load, float], None]


@dataclass(slots=True)
class Activity:
    """Whether the engine computes. ``in_step``: a step is under way; ``last``: when one was last,
    in seconds on the monotonic clock."""

    in_step: bool = False
    last: float = -inf

    @property
    def is_busy(self) -> bool:
        """True if the engine computes, or has just done so."""
        return self.in_step or time.monotonic() - self.last < IDLE_SECONDS


class StoreThread:
    """Calls a store. ``reads``: loads come from it; ``writes``: blocks are stored there.
    ``activity``: of the engine, if writes must leave it its processors: they then take only a small
    share of the time while it computes. ``most_pending``: bytes of blocks that may wait to be
    stored, at least the usual; further ones are not stored."""

    def __init__(
        self,
        store: BlockStore,
        loading: Loading,
        *,
        reads: bool = True,
        writes: bool = True,
        closes: bool = True,
        activity: Activity | None = None,
        most_pending: int = 0,
    ) -> None:
        self.store = store
        self.name = str(store.name)
        self.reads = reads
        self.writes = writes
        self._closes = closes  # the store, at the end: one thread of those that it has
        self.counts: Counter[str] = Counter()
        self._loading = loading
        self._activity = activity
        self._most_pending = max(most_pending, MOST_PENDING if activity is None else MOST_PACED)
        self._write_after = -inf  # on the monotonic clock, while the engine computes
        self._is_left_out = False
        self._faults: Counter[str] = Counter()  # in a row, by method or kind
        self._wakened = threading.Condition()  # guards all that follows
        self._epoch = 0
        self._num_pending = 0  # bytes
        self._writes: deque[Write] = deque()
        self._loads: deque[Load] = deque()
        self._now: Load | Write | None = None  # what the thread does
        self._called: tuple[str, float] | None = None  # the method it is in, and since when
        self._is_late = False  # this call has taken too long
        self._forgotten: set[bytes] = set()  # keys of pending writes that are not wanted any more
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv store {self.name}", daemon=True)
        self._thread.start()

    @property
    def is_used(self) -> bool:
        """False after several faults, and while a call takes too long."""
        return not (self._is_left_out or self._is_late)

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""
        return len(self._loads) + isinstance(self._now, Load)

    # -- called by the thread of the steps

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys the store has; none of them if it fails or is not used."""
        if not self.is_used:
            return [False] * len(keys)
        begun = time.perf_counter()
        found = self._checked("contains", lambda: self.store.contains(keys), len(keys))
        seconds = time.perf_counter() - begun
        if seconds > MOST_FIND_SECONDS:
            self._fault("contains", f"took {seconds:.1f} s, but steps wait for it", SLOW)
        else:
            self._faults[SLOW] = 0
        return found or [False] * len(keys)

    def lacking(self, keys: Sequence[bytes]) -> list[int]:
        """The places of the keys whose blocks are to be stored: the store lacks them, and they may
        wait. Those for which too many wait are counted as skipped."""
        if not (self.writes and self.is_used):
            return []
        places = [i for i, has in enumerate(self.contains(keys)) if not has]
        with self._wakened:
            room = max(0, self._most_pending - self._num_pending) // self._loading.block_bytes
            self.counts["skipped"] += max(0, len(places) - room)
        return places[:room]

    def add_writes(self, keys: list[bytes], rows: Callable[[], Rows]) -> None:
        """Store blocks soon, which were ``lacking``. ``rows``: waits until their content is on the
        host, and returns it."""
        num_bytes = len(keys) * self._loading.block_bytes
        with self._wakened:
            if self._is_closed:
                self.counts["skipped"] += len(keys)
                return
            self._num_pending += num_bytes
            self._writes.append(Write(keys, rows, num_bytes, self._epoch))
            self._wakened.notify()

    def add_load(self, load: Load) -> None:
        """Begin a load. It ends without blocks if the store is not used."""
        with self._wakened:
            is_used = self.is_used and not self._is_closed
            if is_used:
                self._loads.append(load)
                self._wakened.notify()
        if not is_used:
            self._end(load, 0.0)

    def check(self) -> None:
        """End what waits for a call that takes too long."""
        if self._called is None or self._is_late:
            return
        with self._wakened:
            if self._called is None or time.monotonic() - self._called[1] < MOST_SECONDS:
                return
            self._is_late = True
            method, ended = self._called[0], [*self._loads]
            self._loads.clear()
            if isinstance(self._now, Load) and not self._now.is_ended:
                ended.append(self._now)
            for load in ended:  # at once: the thread may not fill its blocks any more
                load.is_ended = True
        for load in ended:
            self._loading.ended(load, 0.0)
        self._fault(
            method,
            f"has not returned for {MOST_SECONDS:g} s; it is not used until that",
        )

    def forget(self, keys: Sequence[bytes]) -> None:
        """Never supply these blocks again."""
        with self._wakened:
            if self._writes or isinstance(self._now, Write):
                self._forgotten.update(keys)
        self._withdraw("forget", lambda: self.store.forget(keys))

    def clear(self) -> None:
        """Never supply any block again that was stored before, or that waits to be stored."""
        with self._wakened:
            self._epoch += 1
        self._withdraw("clear", self.store.clear)

    def counters(self) -> dict[str, int]:
        """Counters of the store and of its use, apart from what it has at present."""
        counted = dict(self.counts)
        if self._is_late:  # it might not answer
            return counted
        try:
            for name, count in self.store.counts().items():
                if name not in HELD:
                    counted[str(name)] = counted.get(str(name), 0) + int(count)
        except Exception:  # only counters are missing
            counted["errors"] = counted.get("errors", 0) + 1
        return counted

    def use(self) -> StoreUse:
        """What the store has at present; nothing while it might not answer."""
        num_blocks = num_bytes = 0
        if not self._is_late:
            with suppress(Exception):  # only figures are missing
                found = self.store.counts()
                num_blocks, num_bytes = (int(found.get(name, 0)) for name in HELD)
        is_common = bool(getattr(self.store, "is_common", False))
        return StoreUse(num_blocks, num_bytes, int(self.is_used), is_common)

    def begin_close(self) -> None:
        """Store what waits, then close the store. Nothing is loaded any more."""
        with self._wakened:
            self._is_closed = True
            self._loads.clear()
            self._wakened.notify()

    def end_close(self, timeout: float) -> None:
        """Wait for the end. A store that takes longer is left alone after its present call."""
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return
        with self._wakened:
            num_left = sum(len(write.keys) for write in self._writes)
            self._writes.clear()
        logger.warning(
            "the KV store %s did not end in time; %d blocks are not stored", self.name, num_left
        )

    # -- in the thread of the store

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, Load):
                try:
                    self._read(work)
                finally:
                    self._end(work, 0.0)  # if it has not ended yet
            else:
                self._write(work)
        if self._closes:
            self._checked("close", self.store.close)

    def _next(self) -> Load | Write | None:
        with self._wakened:
            if isinstance(self._now, Write):
                self._num_pending -= self._now.num_bytes
                if not self._writes:
                    self._forgotten.clear()
            self._now = None
            while not (self._loads or self._is_closed or (self._writes and self._may_write)):
                self._wakened.wait(LOOK_SECONDS if self._writes else None)
            if self._loads:
                self._now = self._loads.popleft()
            elif self._writes:
                self._now = self._writes.popleft()
            return self._now

    @property
    def _may_write(self) -> bool:
        is_paced = self._activity is not None and self._activity.is_busy
        return not is_paced or time.monotonic() >= self._write_after

    def _read(self, load: Load) -> None:
        """Read what a load needs, in batches."""
        order, begun = load.order, time.perf_counter()
        try:
            size = max(1, BATCH_BYTES // self._loading.block_bytes)
            for start in range(0, len(load.places), size):
                places = load.places[start : start + size]
                rows, keys = self._loading.rows(len(places)), [order.keys[i] for i in places]
                good = self._timed("read", self.store.read, keys, rows)
                if good is None or load.is_ended:
                    break
                nth = np.flatnonzero(good)
                if nth.size:
                    rows = rows if len(nth) == len(places) else rows[nth]
                    self._loading.fill(order, [places[n] for n in nth.tolist()], rows)
                missing = [key for key, is_good in zip(keys, good, strict=True) if not is_good]
                if missing and any(self.contains(missing)):
                    what = f"has not supplied {len(missing)} blocks, but contains still has some"
                    self._fault("read", what, PROMISED)
                else:
                    self._faults[PROMISED] = 0
        except Exception as error:  # memory is short, or a device fails
            self._fault("read", _words(error))
        self._end(load, time.perf_counter() - begun)

    def _write(self, write: Write) -> None:
        with self._wakened:
            is_wanted = self.is_used and write.epoch == self._epoch
            wanted = [i for i, key in enumerate(write.keys) if key not in self._forgotten]
        if not (is_wanted and wanted):
            return
        keys = [write.keys[i] for i in wanted]
        try:
            rows = write.rows()
            rows = rows if len(wanted) == len(write.keys) else rows[wanted]
        except Exception as error:  # memory is short, or a device fails
            self._fault("write", _words(error))
            return
        begun = time.monotonic()
        self.counts["stored"] += sum(self._timed("write", self.store.write, keys, rows) or ())
        now = time.monotonic()
        self._write_after = now + (now - begun) * (1 / BUSY_SHARE - 1)
        with self._wakened:
            gone = self._forgotten.intersection(keys)
            is_cleared = write.epoch != self._epoch
        if gone or is_cleared:  # meanwhile
            self._withdraw("forget", lambda: self.store.forget(keys if is_cleared else list(gone)))

    def _timed(
        self,
        method: str,
        call: Callable[[list[bytes], Rows], object],
        keys: list[bytes],
        rows: Rows,
    ) -> list[bool] | None:
        """Call a method of the store, whose time ``check`` watches."""
        with self._wakened:
            self._called = method, time.monotonic()
        good = self._checked(method, lambda: call(keys, rows), len(keys))
        with self._wakened:
            self._called, self._is_late = None, False
        return good

    # -- in both

    def _withdraw(self, method: str, call: Callable[[], object]) -> None:
        """Withdraw blocks. A store that may supply them nevertheless is used no more."""
        if self._is_left_out:
            return
        if self._is_late:
            self._fault(method, "cannot be called, since another call has not returned")
        elif self._checked(method, call) is not None:
            return
        self._leave_out(f"{method} has failed, so it may have blocks that are not valid any more")

    def _checked(
        self, method: str, call: Callable[[], object], num: int | None = None
    ) -> list[bool] | None:
        """Call the store. Returns its answer, which must be ``num`` booleans; [] if nothing is
        expected, ``None`` after a fault."""
        try:
            answer = call()
        except BaseException as error:  # also what native extensions raise
            is_own = threading.current_thread() is not self._thread
            if is_own and isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._fault(method, _words(error))
            return None
        found = [] if num is None else booleans(answer, num)
        if found is None:
            self._fault(method, f"answered {_shown(answer)}, must be a list of {num} booleans")
        elif not self._is_late:
            self._faults[method] = 0
        return found

    def _fault(self, method: str, what: str, kind: str = "") -> None:
        """Note a fault of a method. ``kind``: of a call that the method itself has not failed."""
        with self._wakened:
            self.counts["errors"] += 1
            self._faults[kind or method] += 1
            num = self._faults[kind or method]
        if self._is_left_out:
            return
        logger.warning("the KV store %s failed: %s %s", self.name, method, what)
        if num >= MOST_FAULTS:
            self._leave_out(f"{method} has failed {MOST_FAULTS} times in a row")

    def _leave_out(self, why: str) -> None:
        with self._wakened:
            if self._is_left_out:
                return
            self._is_left_out = True
            self.counts["left_out"] += 1
            ended = [*self._loads]
            self._loads.clear()
        logger.warning(
            "the KV store %s is not used any more: %s; requests compute their tokens",
            *(self.name, why),
        )
        for load in ended:
            self._end(load, 0.0)

    def _end(self, load: Load, seconds: float) -> None:
        """Note that a load has ended, once."""
        with self._wakened:
            if load.is_ended:
                return
            load.is_ended = True
        self._loading.ended(load, seconds)


def booleans(answer: object, num: int) -> list[bool] | None:
    """The answer of a store as ``num`` booleans; ``None`` if it is something else."""
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple) or len(answer) != num:
        return None
    kinds = set(map(type, answer))
    return [bool(each) for each in answer] if kinds <= {bool, np.bool_} else None


def _words(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error!s:.200}"


def _shown(answer: Any) -> str:
    try:
        return f"{answer!r:.80}"
    except Exception:
        return type(answer).__name__
