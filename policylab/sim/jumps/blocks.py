"""RepeatingKV: a KVManager that reserves and publishes blocks for many steps at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from engine.config.kv_groups import FULL, Group, window_blocks
from engine.kv.manager import KVManager
from engine.kv.tables import Allocation, KVRequest
from policylab.sim.jumps.stretch import Growth
from policylab.sim.kv_groups import KVPeaks


class RepeatingKV(KVManager):
    """A KV manager that reserves and publishes the blocks of many steps in one call, with the same
    result as step by step."""

    def most_repeats(
        self, rows: NDArray[np.intp], starts: NDArray[np.int32], most: int, *, is_alone: bool
    ) -> int:
        """Returns a number of steps, up to ``most``, for which the free blocks suffice if each
        request in ``rows`` computes one token per step.

        ``starts``: position of each request's first new token. ``is_alone``: no step is in flight.
        Returns 0 with listeners for cache events, and with steps in flight of a
        model with several groups or windows, which are not supported."""
        if self._prefix_index.events is not None:
            return 0
        is_grouped = self.groups != (FULL,)
        if is_grouped and not is_alone:
            return 0
        free = self.pool.num_free
        if len(rows) * (most // self.block_size + 1) * self.num_groups <= free:
            return most
        held = self.num_held[rows]
        spare = [self._spare_entries(rows, g, group) for g, group in self.tables.windows]
        num_full = self.num_groups - len(spare)
        num_enough, num_too_many = 0, most + 1
        while num_too_many - num_enough > 1:
            middle = (num_enough + num_too_many) // 2
            entries = (-(-(starts + middle) // self.block_size) - held).clip(min=0)
            needed = num_full * int(entries.sum())
            needed += sum(int(np.minimum(entries, most_more).sum()) for most_more in spare)
            is_enough = needed <= free
            num_enough, num_too_many = (middle, num_too_many) if is_enough else (num_enough, middle)
        return num_enough

    def _spare_entries(self, rows: NDArray[np.intp], g: int, group: Group) -> NDArray[np.int64]:
        """By how many blocks each request can grow at most in a group with a window, before it
        gives back a block for each that it takes. Shared blocks are not given back."""
        most, refs = window_blocks(group.window, 1, self.block_size), self.pool.num_refs
        tables = [self._allocations[row].tables[g] for row in rows.tolist()]
        own = [[refs[block] for block in table].count(1) for table in tables]
        return np.maximum(most - np.array(own, dtype=np.int64), 0) + 1

    def only_takes(self, rows: Sequence[int]) -> bool:
        """True if the running requests in ``rows`` give back no more blocks than they take when
        they grow, so that the number of free blocks never rises. False for models with chunked
        attention: at the end of a chunk all its blocks are given back."""
        if any(group.is_chunked for group in self.groups):
            return False
        for row in rows:
            tables = self._allocations[row].tables
            for g, group in self.tables.windows:
                position = len(tables[g]) * self.block_size
                if len(group.outside(tables[g], position, self.block_size)) > 1:
                    return False
        return True

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
        if self.groups != (FULL,):
            return self._repeat_in_order(reqs, rows.tolist(), starts, order, times)
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
        growth.peaks.note(self)
        return growth

    def _repeat_in_order(
        self,
        reqs: Sequence[KVRequest],
        rows: Sequence[int],
        starts: NDArray[np.int32],
        order: Sequence[int],
        times: Sequence[float],
    ) -> Growth:
        """``repeat`` for several groups or windows, without steps in flight. Blocks are taken,
        given back and published in the order of single steps, on which later block ids depend."""
        size, num_steps = self.block_size, len(times)
        rooms = (self.num_held[rows] * size - starts).tolist()
        growing = _by_step(rooms, num_steps, size)
        filling = _by_step((size - 1 - starts % size).tolist(), num_steps, size)
        places = {row: place for place, row in enumerate(rows)}
        growth = Growth(peaks=KVPeaks(self.groups))
        growth.peaks.note(self)
        for step in sorted({0, *growing, *filling}):  # the first plan may report freed blocks
            if grown := growing.get(step):
                self.set_time(times[step])
                self.reserve_next([rows[place] for place in sorted(grown, key=order.__getitem__)])
            deltas = self.tables.drain()
            growth.steps += [step] * len(deltas.rows)
            growth.places += [places[row] for row in deltas.rows]
            growth.indices += deltas.indices
            growth.blocks += deltas.blocks
            growth.groups += deltas.groups
            growth.peaks.note(self)
            if full := filling.get(step):
                self.commit_next([reqs[place] for place in full])
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


def _by_step(firsts: Sequence[int], num_steps: int, period: int) -> dict[int, list[int]]:
    """The indices in ``firsts`` by step: each occurs at its first step and then every ``period``
    steps, before ``num_steps``."""
    found: dict[int, list[int]] = {}
    for place, first in enumerate(firsts):
        for step in range(first, num_steps, period):
            found.setdefault(step, []).append(place)
    return found
