"""Tails: the last, partly filled KV blocks of preempted requests.

A preempted request finds its full blocks again by their hashes. With tails it finds its last block,
too, so that it computes no token again: the block is cached under a key that only this request
looks up. When the request resumes, it writes on into its tail, which thereby leaves the cache."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.config.kv_groups import NULL_BLOCK
from engine.kv.block_pool import PrefixCache
from engine.kv.prefix_index import Chains, media_runs
from engine.kv.tables import Allocation, KVRequest, Tail

MARK = b"partly filled"  # too long for anyone to find a hash that ends like it


def is_tail(key: bytes) -> bool:
    """True for the key of a tail."""
    return key[-1 - len(MARK) : -1] == MARK


def tail_keys(
    chains: Chains, chain: list[bytes], req: KVRequest, num_tokens: int, num_groups: int
) -> list[bytes]:
    """The keys, one for each group of layers, of the block that holds the last of the request's
    first ``num_tokens`` tokens. ``chain``: hashes of the request's full blocks."""
    size = chains.block_size
    first = num_tokens // size
    chains.extend(chain, req, first * size)
    parent = chain[first - 1] if first else chains.root(req)
    [(_, _, media)] = media_runs(req.media, size, first, first + 1)
    data = req.tokens[first * size : num_tokens].tobytes()
    name = chains.hasher.fold(parent, msgspec.msgpack.encode((req.arrival, media, data)))
    return [name + MARK + bytes((group,)) for group in range(num_groups)]


class Tails:
    """Caches tails, finds them and withdraws them. ``certain``: returns how many of a request's
    first tokens have KV that steps in flight do not write any more; ``None``: no tails are kept. In
    the pool alone they would be overwritten first, so they pay only with copies outside it."""

    def __init__(self, cache: PrefixCache, chains: Chains, num_groups: int) -> None:
        self.certain: Callable[[KVRequest], int] | None = None
        self._cache = cache
        self._chains = chains
        self._num_groups = num_groups

    def publish(self, req: KVRequest, allocation: Allocation) -> None:
        """Cache the last block of a request that is about to give its blocks back, if it is partly
        filled."""
        if self.certain is None or not allocation.blocks:
            return
        num_tokens = min(self.certain(req), len(req.tokens))
        first, num_in_tail = divmod(num_tokens, self._chains.block_size)
        blocks = [table[first] for table in allocation.tables] if num_in_tail else []
        if not blocks or any(b == NULL_BLOCK or self._cache.hash_of(b) for b in blocks):
            return
        keys = tail_keys(self._chains, allocation.chain, req, num_tokens, self._num_groups)
        allocation.tail = Tail(num_tokens, keys)
        self._cache.publish_each(blocks, keys)

    def wanted(self, req: KVRequest, allocation: Allocation) -> Tail | None:
        """The request's tail, if a prefix hit may end with it: the last token is always
        computed."""
        tail = allocation.tail
        return tail if tail is not None and tail.num_tokens < len(req.tokens) else None

    def find(self, req: KVRequest, allocation: Allocation, num_blocks: int) -> list[int]:
        """The blocks of the request's tail, one for each group, if all are cached and follow a
        prefix hit of ``num_blocks`` blocks; else []."""
        tail = self.wanted(req, allocation)
        if tail is None or tail.num_tokens // self._chains.block_size != num_blocks:
            return []
        blocks = [block for key in tail.keys if (block := self._cache.find(key)) is not None]
        return blocks if len(blocks) == self._num_groups else []

    def drop(self, allocation: Allocation | None, start: int = 0) -> None:
        """Withdraw a request's tail, if it holds tokens from position ``start`` on: their KV is
        wrong."""
        tail = None if allocation is None else allocation.tail
        if allocation is None or tail is None or tail.num_tokens <= start:
            return
        allocation.tail = None
        for key in tail.keys:
            for block in self._cache.find_all(key):
                self._cache.unpublish(block)
        for follower in self._cache.followers:
            follower.withdrawn(tail.keys)
