"""DiskStore: keeps KV blocks in a directory, bounded, across restarts.

    write ──> slots of this process's own segment ──(full)──> the next one; the oldest are removed,
                                                              what was read of them is copied
    read  ──> by an index in memory, checked by checksums

The files are described in ``disk_files.py``. The index is made from their tables at the start, and
follows what other processes add, remove and withdraw by looking at intervals; a withdrawn block is
also noticed when it is read. Only withdrawals are synced to the disk: what a failure of power
leaves unwritten is found by its checksum."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile

import numpy as np

from engine.errors import ConfigError
from engine.kv_transfer.disk_files import (
    MAX_KEY_BYTES,
    MAX_RUN_BLOCKS,
    Lack,
    Row,
    Segment,
    SegmentName,
    Shape,
    StoreDirectory,
)
from engine.kv_transfer.disk_index import DiskIndex, Known
from engine.kv_transfer.stores import Rows, StoreIdentity

logger = logging.getLogger("engine.kv_transfer")

GIB = 1 << 30
REFRESH_SECONDS = 1.0
SEGMENTS = 32  # in a full directory, if all processes have the same bound
MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENTS = 4
MAX_RUN_BYTES = 64 << 20
COPY_BYTES = 8 << 20  # memory for blocks that are copied to a new segment
MOST_COPIED_BYTES = 64 << 20  # to a segment, while other processes may wait


def open_disk_store(
    directory: str | os.PathLike[str],
    most_bytes: int,
    identity: StoreIdentity,
    *,
    refresh_seconds: float = REFRESH_SECONDS,
) -> DiskStore:
    """Open the store of KV blocks in ``directory``, which is made if missing. It may be shared by
    processes and identities.

    ``most_bytes``: bound on the bytes of all its segments; the oldest are removed if there are
    more. ``refresh_seconds``: how often to look what other processes have written.

    Raises ``ConfigError`` if the directory cannot be used, others may write to it, or the bound is
    too small."""
    smallest = MIN_SEGMENTS * Shape(1, identity.block_bytes).num_bytes
    if most_bytes < smallest:
        raise ConfigError(
            f"kv_offload_dir_gib is {most_bytes / GIB:.6g} ({most_bytes} bytes), must be at least "
            f"{smallest / GIB + 5e-7:.6f} ({smallest} bytes) for blocks of {identity.block_bytes} "
            "bytes: give the directory more"
        )
    files = StoreDirectory(os.fspath(directory), most_bytes, identity)
    return DiskStore(files, identity.block_bytes, refresh_seconds)


class DiskStore:
    """A ``BlockStore`` in files. Made by ``open_disk_store``.

    Errors of the file system cost the blocks concerned; each kind is logged once."""

    name = "disk"
    is_common = True  # the directory's blocks are counted, which all cores use

    def __init__(self, files: StoreDirectory, block_bytes: int, refresh_seconds: float) -> None:
        self._files = files
        self._index = DiskIndex()
        most_bytes = min(files.most_bytes // SEGMENTS, MAX_SEGMENT_BYTES)
        self._shape = Shape.within(most_bytes, block_bytes)
        # Held by whoever changes files, or follows what others change; guards the next four.
        self._changing = threading.RLock()
        self._active: tuple[Known, Segment] | None = None
        self._ignored: set[SegmentName] = set()
        self._may_shrink = True
        self._last_withdrawal = files.last_withdrawal()
        # Guards the next four; never held during input or output.
        self._use = threading.Condition()
        self._counts = dict.fromkeys(("evicted", "copied", "damaged", "refused", "errors"), 0)
        self._warnings: set[str] = set()
        self._num_reading = 0
        self._is_closed = False
        self.refresh()
        self._closing = threading.Event()
        self._follower = threading.Thread(
            target=self._follow, args=(refresh_seconds,), name="kv-disk", daemon=True
        )
        self._follower.start()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._index.contains(keys)

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        found = [False] * len(keys)
        with self._use:
            if self._is_closed:
                return found
            self._num_reading += 1
        try:
            for known, wanted in self._index.find(keys).items():
                for position in self._read(known, wanted, keys, rows):
                    found[position] = True
        finally:
            with self._use:
                self._num_reading -= 1
                self._use.notify_all()
        return found

    def write(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        with self._changing:
            present = self._index.contains(keys)
            new = {key: row for row, key in enumerate(keys) if not present[row]}
            missing = [key for key in new if 0 < len(key) <= MAX_KEY_BYTES]
            refused = new.keys() - set(missing)
            try:
                while missing and not self._is_closed:
                    batch = missing[: self._make_slots()]
                    self._append(batch, [rows[new[key]].data for key in batch])
                    del missing[: len(batch)]
            except OSError as error:
                self._give_up(error)
            refused.update(missing)
        kept = [key not in refused for key in keys]
        self._count("refused", kept.count(False))
        return kept

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._changing, self._locked_if_possible():
            self.refresh()  # other processes may have written copies
            places = self._index.find_all(keys)
            for known, slots in places:
                self._index.lose(known, slots)
                try:
                    self._withdraw(known, slots)
                except OSError as error:
                    self._failed(error)
                    self._remove(known.name)
            if places:
                with suppress(OSError):
                    self._files.note_withdrawal()

    def clear(self) -> None:
        with self._changing, self._locked_if_possible():
            if self._is_closed:
                return
            self._finish_active()
            names = {known.name for known in self._index.segments()}
            try:
                names.update(self._files.own_names())
            except OSError as error:
                self._failed(error)
            for name in names:
                self._remove(name)
            with suppress(OSError):
                self._files.sync()

    def counts(self) -> dict[str, int]:
        num_blocks = len(self._index)
        num_bytes = num_blocks * self._shape.block_bytes
        with self._use:
            return {"num_blocks": num_blocks, "num_bytes": num_bytes, **self._counts}

    def refresh(self) -> None:
        """Learn what other processes have added and removed. Happens at intervals anyway."""
        with self._changing:
            if self._is_closed:
                return
            try:
                unfinished = self._list()
                self._follow_withdrawals()
            except OSError as error:
                self._failed(error)
                return
            for name, is_finished in unfinished.items():
                try:
                    self._scan(name, is_finished)
                except FileNotFoundError:
                    pass  # another process has removed it
                except OSError as error:
                    self._failed(error)
                    self._ignored.add(name)

    def close(self) -> None:
        self._closing.set()
        self._follower.join()
        with self._changing:
            if self._is_closed:
                return
            with self._use:
                self._is_closed = True
                self._use.wait_for(lambda: not self._num_reading)
            self._finish_active()
            for known in self._index.segments():
                self._index.drop(known)
            self._files.close()

    def _follow(self, seconds: float) -> None:
        while not self._closing.wait(seconds):
            self.refresh()

    def _count(self, name: str, number: int) -> None:
        with self._use:
            self._counts[name] += number

    def _warn(self, problem: str) -> None:
        """Log a problem with the directory, once."""
        with self._use:
            is_new = problem not in self._warnings
            self._warnings.add(problem)
        if is_new:
            logger.warning("KV blocks in %s: %s", self._files.path, problem)

    def _failed(self, error: OSError) -> None:
        self._count("errors", 1)
        self._warn(f"{error.strerror or error}; what is not stored or read will be computed")

    def _damaged(self, number: int) -> None:
        self._count("damaged", number)
        self._warn("some are damaged, and will be computed again")

    def _run_of(self, num_bytes: int) -> int:
        """How many blocks to read or write in one call."""
        return min(max(1, num_bytes // self._shape.block_bytes), MAX_RUN_BLOCKS)

    # Reads hold no lock while they wait for the disk.

    def _read(
        self, known: Known, wanted: list[tuple[int, int]], keys: Sequence[bytes], rows: Rows
    ) -> list[int]:
        """Read blocks of one segment. ``wanted``: slots in order, and positions of their keys.
        Returns the positions whose blocks have been read."""
        done: list[int] = []
        try:
            with self._files.opened(known.name) as segment:
                if segment is None:
                    self._damaged(self._index.drop(known))
                    return done
                for run in _runs(wanted, self._run_of(MAX_RUN_BYTES)):
                    first = run[0][0]
                    fetched = segment.fetch(first, [rows[position].data for _, position in run])
                    for (slot, position), key in zip(run, fetched, strict=True):
                        if key == keys[position]:
                            done.append(position)
                        else:
                            self._lose(known, segment, slot, key)
                    self._mark(known, segment, first, len(run))
        except FileNotFoundError:  # another process has removed it
            self._index.drop(known)
        except OSError as error:
            self._failed(error)
            self._index.lose(known, [slot for slot, _ in wanted])
        return done

    def _lose(self, known: Known, segment: Segment, slot: int, key: bytes | Lack) -> None:
        """Drop a block that is damaged, or that another process has withdrawn."""
        self._index.lose(known, [slot])
        if key is not Lack.WITHDRAWN:
            self._damaged(1)
            with suppress(OSError):
                segment.withdraw(slot)

    @staticmethod
    def _mark(known: Known, segment: Segment, slot: int, count: int) -> None:
        """Mark blocks as read, so that they are copied before their segment is removed."""
        slots = range(slot, slot + count)
        if not known.marked.issuperset(slots):
            known.marked.update(slots)
            with suppress(OSError):
                segment.mark(slot, count)

    # What follows is called with `_changing` held.

    @contextmanager
    def _locked_if_possible(self) -> Iterator[None]:
        """Hold the directory's lock, so that no other process copies blocks meanwhile."""
        with ExitStack() as held:
            if not self._is_closed:
                try:
                    held.enter_context(self._files.locked())
                except OSError as error:
                    self._failed(error)
            yield

    def _make_slots(self) -> int:
        """Number of blocks that can be appended next: at least one."""
        if self._active is not None and not self._active[1].is_intact():
            self._finish_active()  # somebody has removed or cut the file
        if self._active is None or self._active[0].num_seen == self._active[0].num_slots:
            self._start_segment()
        assert self._active is not None
        known = self._active[0]
        return min(known.num_slots - known.num_seen, self._run_of(MAX_RUN_BYTES))

    def _append(self, keys: Sequence[bytes], rows: Sequence[Row]) -> None:
        assert self._active is not None
        known, segment = self._active
        start = known.num_seen
        segment.append(start, keys, rows)
        self._index.enter(known, dict(enumerate(keys, start)), start + len(keys))
        self._may_shrink = True

    def _start_segment(self) -> None:
        """Begin the next segment. The oldest ones are removed for it; of their blocks, those that
        have been read are copied, which may take half of it, but not long."""
        self._finish_active()
        removed: list[tuple[SegmentName, int]] = []
        try:
            with self._files.locked():
                self._files.make_room(self._shape.num_bytes, removed)
                name, segment = self._files.create(self._shape)
                self._active = Known(name, self._shape.num_slots), segment
                self._index.enter(self._active[0], {}, 0)
                for old, fd in removed:
                    self._copy_read_blocks(old, fd)
        finally:
            for old, fd in removed:
                os.close(fd)
                known = self._index.segment(old)
                self._count("evicted", self._index.drop(known) if known else 0)

    def _copy_read_blocks(self, name: SegmentName, fd: int) -> None:
        segment = self._files.segment(name, fd)
        assert self._active is not None
        most = min(self._shape.num_slots // 2, MOST_COPIED_BYTES // self._shape.block_bytes)
        room = most - self._active[0].num_seen
        if segment is None or room <= 0:
            return
        marks, keys = segment.marks(), segment.entries(0, segment.shape.num_slots).keys
        slots = [
            (slot, slot)
            for slot, key in enumerate(keys)
            if isinstance(key, bytes) and marks[slot] and not self._index.is_elsewhere(key, name)
        ]
        for run in _runs(slots[:room], self._run_of(COPY_BYTES)):
            rows = np.empty((len(run), self._shape.block_bytes), np.uint8)
            fetched = segment.fetch(run[0][0], [row.data for row in rows])
            good = {
                key: row.data
                for key, row in zip(fetched, rows, strict=True)
                if isinstance(key, bytes)
            }
            self._append(list(good), list(good.values()))
            self._count("copied", len(good))

    def _finish_active(self) -> None:
        """Append no more to the segment; what it has reserved and not used is released."""
        if self._active is None:
            return
        known, segment = self._active
        self._active = None
        known.is_finished = True
        try:
            if not os.fstat(segment.fd).st_nlink or not known.num_seen:
                self._index.drop(known)
                self._files.remove(known.name)
            else:
                segment.finish(known.num_seen)
        except OSError as error:
            self._failed(error)
        finally:
            os.close(segment.fd)

    def _give_up(self, error: OSError) -> None:
        """Stop appending to the segment after an error. On a full disk the bound becomes what there
        is, so that new blocks can take the place of old ones."""
        self._failed(error)
        self._finish_active()
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._may_shrink:
            self._may_shrink = False  # again only if that helps
            with suppress(OSError):
                size = self._shape.num_bytes
                self._files.most_bytes = max(MIN_SEGMENTS * size, self._files.num_bytes() - size)

    def _withdraw(self, known: Known, slots: Sequence[int]) -> None:
        with suppress(FileNotFoundError), self._files.opened(known.name) as segment:
            if segment is not None:
                for slot in slots:
                    segment.withdraw(slot)
                os.fdatasync(segment.fd)

    def _remove(self, name: SegmentName) -> None:
        known = self._index.segment(name)
        if known is not None:
            self._index.drop(known)
        try:
            self._files.remove(name)
        except OSError as error:
            self._failed(error)
            self._ignored.add(name)

    def _list(self) -> dict[SegmentName, bool]:
        """Drop segments that are no longer there. Returns those of which more may be learnt, and
        whether they are finished."""
        unfinished = {}
        with self._files.locked():
            names = set(self._files.own_names()) - self._ignored
            active = self._active[0].name if self._active else None
            for name in names - {active}:
                known = self._index.segment(name)
                if known is None or not known.is_finished:
                    with suppress(FileNotFoundError):
                        unfinished[name] = self._files.is_finished(name)
        if active is not None and active not in names:
            self._finish_active()
        for known in self._index.segments():
            if known.name not in names:
                self._index.drop(known)
        return unfinished

    def _follow_withdrawals(self) -> None:
        """Drop blocks that other processes have withdrawn since the last time."""
        now = self._files.last_withdrawal()
        if now == self._last_withdrawal:
            return
        self._last_withdrawal = now
        for known in self._index.segments():
            with suppress(FileNotFoundError), self._files.opened(known.name) as segment:
                if segment is not None:
                    self._index.lose(known, segment.withdrawn(known.num_seen))

    def _scan(self, name: SegmentName, is_finished: bool) -> None:
        """Read the entries of a segment that are not known yet."""
        with self._files.opened(name) as segment:
            if segment is None:
                if is_finished:
                    self._damaged(1)
                    self._remove(name)
                return
            known = self._index.segment(name) or Known(name, segment.shape.num_slots)
            keys = segment.entries(known.num_seen, known.num_slots).keys
            if is_finished:
                if not self._finish(known, segment, keys):
                    return
            else:  # the owner may be writing the next entry
                ends = (Lack.UNUSED, Lack.DAMAGED)
                keys = list(takewhile(lambda key: key not in ends, keys))
            found = {
                slot: key for slot, key in enumerate(keys, known.num_seen) if isinstance(key, bytes)
            }
            self._index.enter(known, found, known.num_seen + len(keys))

    def _finish(self, known: Known, segment: Segment, keys: list[bytes | Lack]) -> bool:
        """Note that nothing will be appended to a segment, and drop what a crash has left: entries
        of incomplete blocks, and bytes that were reserved. ``keys``: in the slots that are not yet
        known. Returns whether any block is left."""
        known.is_finished = True
        shape, num_bytes = segment.shape, os.fstat(segment.fd).st_size
        num_whole = (num_bytes - shape.blocks_at) // shape.block_bytes
        num_used = known.num_seen
        for slot, key in enumerate(keys, known.num_seen):
            if key is Lack.UNUSED:
                continue
            num_used = slot + 1
            if key is Lack.DAMAGED or (slot >= num_whole and key is not Lack.WITHDRAWN):
                keys[slot - known.num_seen] = Lack.DAMAGED
                self._lose(known, segment, slot, Lack.DAMAGED)
        if not num_used:
            self._remove(known.name)
        else:
            with suppress(OSError):
                segment.finish(num_used)
        return num_used > 0


def _runs(wanted: list[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Split pairs into runs of at most ``most`` in which the first items grow by 1."""
    run: list[tuple[int, int]] = []
    for each in wanted:
        if run and (each[0] != run[-1][0] + 1 or len(run) == most):
            yield run
            run = []
        run.append(each)
    if run:
        yield run
