"""Prefix index: finds cached prefixes, publishes full blocks, withdraws invalid ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.kv.events import EventLog
from engine.kv.groups import FULL, Group, find_tables, group_keys
from engine.kv.hashing import BlockHasher, Chains
from engine.kv.prefix_cache import PrefixCache
from engine.kv.request_blocks import Holder, RequestBlocks


class PrefixIndex:
    """Hashes the sequences of requests and keeps the cache and its listener in step."""

    def __init__(
        self,
        cache: PrefixCache,
        groups: Sequence[Group],
        hasher: BlockHasher,
        block_size: int,
        events: EventLog | None,
    ) -> None:
        self.events = events
        self._cache = cache
        self._groups = tuple(groups)
        self._chains = Chains(hasher, block_size)
        self._block_size = block_size
        if events is not None:
            cache.on_loss = events.removed

    def find(self, req: Holder, holding: RequestBlocks, num_blocks: int) -> list[list[int]]:
        """The longest hit of at most so many blocks, as one table for each group.

        If no content was evicted since the remembered hit, the search continues behind it.
        """
        chain, old, cache = holding.chain, holding.hit, self._cache
        self._chains.extend(chain, req, num_blocks * self._block_size)
        if old is None or holding.hit_losses != cache.num_losses or self._groups != (FULL,):
            return find_tables(self._groups, cache, chain[:num_blocks], self._block_size)
        return [old.blocks + cache.prefix(chain[len(old.blocks) : num_blocks])]

    def publish(self, req: Holder, holding: RequestBlocks, first: int, before: int) -> None:
        """The blocks [first, before) are full and written: others may share them."""
        chain, publish = holding.chain, self._cache.publish_each
        self._chains.extend(chain, req, before * self._block_size)
        publish(holding.tables[0][first:before], chain[first:before])
        for g in range(1, len(self._groups)):
            publish(holding.tables[g][first:before], group_keys(chain[first:before], g))
        if self.events is not None:
            self._report(self.events, req, chain, first, before)

    def publish_next(
        self, reqs: Sequence[Holder], holdings: Sequence[RequestBlocks], nth: list[int]
    ) -> None:
        """``publish`` of one block each: the ``nth`` of each table."""
        if self.events is not None or len(self._groups) > 1 or 0 in nth:
            for req, holding, index in zip(reqs, holdings, nth, strict=True):
                self.publish(req, holding, index, index + 1)
            return
        chains = [holding.chain for holding in holdings]
        late = [i for i, chain in enumerate(chains) if len(chain) == nth[i]]
        if late:  # the others were hashed when they were looked up
            self._chains.extend_each([chains[i] for i in late], [reqs[i] for i in late])
        blocks = [holding.tables[0][index] for holding, index in zip(holdings, nth, strict=True)]
        hashes = [chain[index] for chain, index in zip(chains, nth, strict=True)]
        self._cache.publish_each(blocks, hashes)

    def hashes(self, req: Holder, holding: RequestBlocks | None) -> list[bytes]:
        """Hashes of all full blocks of known tokens, also of a request that has ended."""
        chain = [] if holding is None else holding.chain
        self._chains.extend(chain, req, len(req.tokens))
        return chain

    def withdraw(self, hashes: Sequence[bytes]) -> None:
        """Unpublish every block with one of these hashes, whichever request wrote it."""
        for g in range(len(self._groups)):
            for key in group_keys(hashes, g):
                for block in self._cache.find_all(key):
                    self._cache.unpublish(block)

    def clear(self) -> None:
        """Forget all content."""
        self._cache.clear()
        if self.events is not None:
            self.events.cleared()

    def _report(
        self, events: EventLog, req: Holder, chain: Sequence[bytes], first: int, before: int
    ) -> None:
        size = self._block_size
        tokens: array[int] = req.tokens[first * size : before * size]
        parent = chain[first - 1] if first else None
        for g in range(len(self._groups)):
            events.stored(chain[first:before], parent, tokens, req.adapter, g)
