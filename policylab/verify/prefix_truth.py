"""Checks why prefix hits ended, against a memory of all blocks that were ever cached, and what
clients are sent about the cache.

The engine may forget an eviction after ``LEAST_KEPT`` later ones. The check counts evictions once a
step, which misses a few, so it expects only half as many to be remembered."""

from __future__ import annotations

from engine.kv.changes import ID_BYTES
from engine.kv.events import split_key
from engine.kv.evictions import LEAST_KEPT
from engine.kv.prefix_ends import CACHING_OFF, EVICTED, NO_SNAPSHOT, NOT_READ, WINDOW_GONE
from engine.kv.prefix_index import Chains, Sha256Hasher
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler


class PrefixEndTruth:
    """Checks the reason that each request has for the end of its prefix hit."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._kv = scheduler.kv
        self._chains = Chains(Sha256Hasher(), scheduler.kv.block_size)
        self._cached: set[bytes] = set()  # keys at the end of the last step
        self._lost: dict[bytes, int] = {}  # evicted keys: how many were evicted before
        self._num_lost = 0

    def look(self) -> None:
        """Remember the blocks that are cached now."""
        cached = {key for key in self._kv.cache.hashes if key is not None}
        for key in self._cached - cached:
            self._lost[key] = self._num_lost
            self._num_lost += 1
        self._cached = cached

    def check(self, req: Request) -> None:
        """Check the reason of a request that has just been admitted, before ``look``."""
        kv, history = self._kv, req.history
        if history.num_preempted:
            return  # its hit is an earlier one
        num_full, num_found = (req.num_prompt - 1) // kv.block_size, history.num_cached
        reason, age = history.prefix_end
        text = f"{req}: {num_found} cached tokens of {req.num_prompt}, reason {reason!r}, {age} s"
        assert (not reason) == (num_found == num_full * kv.block_size), text
        assert age is None or (age >= 0.0 and reason in (EVICTED, WINDOW_GONE)), text
        if not reason:
            return
        assert (reason == CACHING_OFF) == (not kv.caching), text
        assert (reason == NOT_READ) == (kv.caching and not req.reads_cache), text
        if reason == NO_SNAPSHOT:
            assert kv.states is not None, text
        elif kv.caching and req.reads_cache:
            chain: list[bytes] = []
            self._chains.extend(chain, req, num_found + kv.block_size)
            is_cached, lost = chain[-1] in self._cached, self._lost.get(chain[-1])
            is_recent = lost is not None and self._num_lost - lost < LEAST_KEPT // 2
            text += f", cached: {is_cached}, evicted as number {lost} of {self._num_lost}"
            if reason in (EVICTED, WINDOW_GONE):
                assert is_cached or lost is not None, text
            else:
                assert not is_cached and not is_recent, text
        assert reason != WINDOW_GONE or kv.tables.windows, text


class FollowedCache:
    """Checks that a client that follows the prefix cache knows which blocks it has."""

    def __init__(self, scheduler: Scheduler) -> None:
        kv = scheduler.kv
        self._kv = kv
        self._changes = scheduler.follow_cache()
        self._known: set[bytes] = set()  # ids of blocks
        self._hash_bytes = len(Sha256Hasher.root)
        self._group = next((g for g, group in enumerate(kv.groups) if not group.window), 0)

    def check(self) -> None:
        """Apply the changes since the last call, and compare the outcome with the cache."""
        if self._changes is None:
            return
        is_cleared, stored, removed = self._changes.take()
        self._known = set() if is_cleared else self._known - _parts(removed)
        self._known |= _parts(stored)
        keys = [key for key in self._kv.cache.hashes if key is not None]
        hashes = [split_key(key) for key in keys if len(key) - self._hash_bytes in (0, 1)]
        cached = {each[:ID_BYTES] for each, group in hashes if group == self._group}
        assert self._known == cached, (
            f"a client that follows the cache knows {len(self._known)} blocks, "
            f"{len(self._known ^ cached)} wrongly; {len(cached)} are cached"
        )


def _parts(ids: bytes) -> set[bytes]:
    return {ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES)}
