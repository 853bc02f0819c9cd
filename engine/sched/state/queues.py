"""Requests in rank order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from engine.sched.request import Request


def by_rank(req: Request) -> tuple[object, ...]:
    """Sort key: rank, ties by number of arrival."""
    return (*req.rank, req.arrival)


class RankedQueue:
    """A list kept sorted by rank. Smaller goes first."""

    def __init__(self) -> None:
        self._keys: list[tuple[object, ...]] = []
        self._reqs: list[Request] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Request]:
        """As they are now: an order is asked while requests move from queue to queue."""
        return iter(self._reqs.copy())

    def __getitem__(self, index: int) -> Request:
        return self._reqs[index]

    def add(self, req: Request) -> None:
        """Insert at its rank."""
        key = by_rank(req)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._reqs.insert(index, req)

    def remove(self, req: Request) -> None:
        """Take out; its rank must not have changed since it was added."""
        index = bisect_left(self._keys, by_rank(req))
        if index == len(self._reqs) or self._reqs[index] is not req:
            index = self._reqs.index(req)
        del self._keys[index]
        del self._reqs[index]

    def rerank(self, ranks: Callable[[Sequence[Request]], Sequence[tuple[object, ...]]]) -> None:
        """Ask for all ranks again and sort."""
        reqs, keys = self._reqs, []
        for req, rank in zip(reqs, ranks(reqs), strict=True):
            req.rank = rank
            keys.append((*rank, req.arrival))
        by_arrival: dict[object, Request] = {req.arrival: req for req in reqs}
        keys.sort()
        self._keys = keys
        self._reqs = [by_arrival[key[-1]] for key in keys]
