"""Fences: delay loads into blocks that steps in flight may still write.

step 7 launched, writes KV into block 3 ───────┐
its request ends, block 3 is free              │  a request that computes into block 3 does so
a load wants block 3 ── waits ─────────────────┤  in step 8, after step 7; a load is not ordered
step 7 settled ── the load starts              ┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Start = Callable[[], None]


class Fences:
    """Counts planned and settled steps. For each block, keeps which step was the newest one in
    flight when the block was last freed. Steps are settled in the order in which they were
    planned."""

    def __init__(self, num_blocks: int) -> None:
        self._num_planned = 0
        self._num_settled = 0
        self._fences = [0] * num_blocks
        self._waiting: dict[int, tuple[int, Start]] = {}  # by number of the request

    def planned(self) -> None:
        """Record that a step that writes KV is about to be launched."""
        self._num_planned += 1

    def settled(self) -> None:
        """Record that the oldest step in flight has finished; start the loads waiting for it."""
        self._num_settled += 1
        for number, (fence, start) in list(self._waiting.items()):
            if fence <= self._num_settled:
                del self._waiting[number]
                start()

    def give_back(self, blocks: Sequence[int]) -> None:
        """Record that these blocks were freed; each step in flight may still write them."""
        if self._num_planned > self._num_settled:
            for block in blocks:
                self._fences[block] = self._num_planned

    def when_written(self, number: int, blocks: Sequence[int], start: Start) -> None:
        """Call ``start`` once no step in flight can write these blocks any more. ``number``:
        identifies the request, for ``cancel``."""
        fence = max([self._fences[block] for block in blocks])
        if fence <= self._num_settled:
            start()
        else:
            self._waiting[number] = fence, start

    def cancel(self, number: int) -> bool:
        """Cancel the pending start of this request; False if none is pending."""
        return self._waiting.pop(number, None) is not None
