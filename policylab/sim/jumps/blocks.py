"""RepeatingKV: a KVManager that reserves and publishes blocks for many steps at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from engine.kv.manager import KVManager
from engine.kv.tables import Allocation, KVRequest
from policylab.sim.jumps.stretch import Growth


class RepeatingKV(KVManager):
    """A KV manager that reserves and publishes the blocks of many steps in one call, with the same
    result as step by step."""

    def most_repeats(self, rows: NDArray[np.intp], starts: NDArray[np.int32], most: int) -> int:
        """Returns the number of steps, up to ``most``, for which the free blocks suffice if each
        request in ``rows`` computes one token per step.

        ``starts``: position of each request's first new token. Returns 0 with windows, several
        groups of layers, KV transfers or listeners for cache events, which are not supported."""
        if self.tables.windows or self.num_groups > 1 or self.transfers is not None:
            return 0
        if self._prefix_index.events is not None:
            return 0
        free = self.pool.num_free
        if len(rows) * (most // self.block_size + 1) <= free:
            return most
        held = self.num_held[rows]
        num_enough, num_too_many = 0, most + 1
        while num_too_many - num_enough > 1:
            middle = (num_enough + num_too_many) // 2
            entries = -(-(starts + middle) // self.block_size)
            is_enough = int((entries - held).clip(min=0).sum()) <= free
            num_enough, num_too_many = (middle, num_too_many) if is_enough else (num_enough, middle)
        return num_enough

    def may_gain(self, req: KVRequest, rows: Sequence[int]) -> bool:
        """True if one of the blocks that the running requests in ``rows`` publish next could extend
        the prefix hit of the waiting request ``req``."""
        if not self.caching:
            return False
        hashes = self._hashes(req)
        for row in rows:
            count, chain = int(self.num_published[row]), self._allocations[row].chain
            if count < len(hashes) and chain[count - 1 : count] == hashes[count - 1 : count]:
                return True
        return False

    def repeat(
        self,
        reqs: Sequence[KVRequest],
        rows: NDArray[np.intp],
        starts: NDArray[np.int32],
        known: NDArray[np.int32],
        order: Sequence[int],
        times: Sequence[float],
        num_commits: int,
    ) -> Growth:
        """Reserve blocks for steps in which each request computes one token, and publish the blocks
        that become full in the first ``num_commits`` steps. ``times``: planning time of each step,
        in seconds.

        For each request: ``rows``, its index in this manager; ``starts``, the position of its first
        token; ``known``, the number of its tokens in the cache so far; ``order``, its place in the
        order in which requests take blocks. ``tokens`` of a request has the tokens of all steps."""
        size, allocations = self.block_size, [self._allocations[row] for row in rows.tolist()]
        num_steps = len(times)
        rest = self.num_held[rows] * size - starts  # tokens for which there is room
        takes = [
            (step, order[place], place)
            for place, first in enumerate(rest.tolist())
            if first < num_steps
            for step in range(first, num_steps, size)
        ]
        takes.sort()
        growth = Growth([take[0] for take in takes], [take[2] for take in takes])
        growth.blocks = []
        for step, several in groupby(growth.steps):
            self.set_time(times[step])  # the date of what is evicted
            growth.blocks += self.pool.take(len(list(several)))
        for place, block in zip(growth.places, growth.blocks, strict=True):
            allocation = allocations[place]
            table = allocation.tables[0]
            growth.indices.append(len(table))
            table.append(block)
            allocation.num_sent += 1
        self.num_held[rows] = [len(allocation.tables[0]) for allocation in allocations]
        before = self.num_published[rows].tolist()
        self.num_published[rows] = (known + num_commits) // size
        if self.caching:
            fills = [
                (step, place)
                for place, first in enumerate((size - known % size).tolist())
                if first <= num_commits
                for step in range(first, num_commits + 1, size)
            ]
            fills.sort()
            self._publish_along(reqs, allocations, before, [fill[1] for fill in fills])
        return growth

    def _publish_along(
        self,
        reqs: Sequence[KVRequest],
        allocations: Sequence[Allocation],
        nth: list[int],
        places: Sequence[int],
    ) -> None:
        """Publish full blocks in the prefix cache, one for each entry of ``places``: the next block
        of the request with that index in ``reqs``. ``nth``: for each request, the index in its
        block table of the first block to publish."""
        counts = [0] * len(nth)
        for place in places:
            counts[place] += 1
        coming: dict[int, Iterator[tuple[int, bytes]]] = {}
        for place, (first, count) in enumerate(zip(nth, counts, strict=True)):
            if count:
                allocation, end = allocations[place], first + count
                chain = self._prefix_index.hashes(reqs[place], allocation)
                coming[place] = zip(allocation.tables[0][first:end], chain[first:end], strict=True)
        if places:
            blocks, hashes = zip(*[next(coming[place]) for place in places], strict=True)
            self.cache.publish_each(blocks, hashes)
