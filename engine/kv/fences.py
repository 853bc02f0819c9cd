"""Fences: delay loads into freed KV blocks that a step in flight may still write.

step 7 launched, writes KV into block 3 ───────┐
its request ends, block 3 is free              │  a request that gets block 3 computes in step 8,
a load into block 3 is requested, and waits ───┤  which runs after step 7; but a load could run
step 7 finished ── the load starts             ┘  at the same time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Start = Callable[[], None]


class Fences:
    """Tracks for each block the newest step that may still write it after it was freed. Steps
    finish in the order in which they were planned."""

    def __init__(self, num_blocks: int) -> None:
        self._num_planned = 0
        self._num_settled = 0
        self._fences = [0] * num_blocks
        self._waiting: dict[int, tuple[int, Start]] = {}  # by number of the request

    def planned(self) -> None:
        """Record that a step that writes KV is about to be launched."""
        self._num_planned += 1

    def settled(self) -> None:
        """Record that the oldest step in flight has finished. Starts loads that waited for this
        step."""
        self._num_settled += 1
        for number, (fence, start) in list(self._waiting.items()):
            if fence <= self._num_settled:
                del self._waiting[number]
                start()

    def give_back(self, blocks: Sequence[int]) -> None:
        """Record that blocks were freed while steps in flight may still write them."""
        if self._num_planned > self._num_settled:
            for block in blocks:
                self._fences[block] = self._num_planned

    def when_written(self, number: int, blocks: Sequence[int], start: Start) -> None:
        """Call ``start`` as soon as no step in flight can write these blocks, perhaps immediately.
        ``number``: the request's number, for ``cancel``."""
        fence = max([self._fences[block] for block in blocks])
        if fence <= self._num_settled:
            start()
        else:
            self._waiting[number] = fence, start

    def cancel(self, number: int) -> bool:
        """Cancel the ``start`` that request ``number`` waits for. Returns False if it has none."""
        return self._waiting.pop(number, None) is not None
