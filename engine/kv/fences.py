"""Fences: which free blocks steps in flight still write, for writes that are not ordered by steps.

step 7 launched, writes a token into block 3 ──┐
its request ends, block 3 is free              │  a request that computes into block 3 does so
a load wants block 3 ── waits ─────────────────┤  in step 8, after it; a load would not wait
step 7 settled ── the load starts              ┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Start = Callable[[], None]


class Fences:
    """Counts steps as they are planned and settled, in the same order, and keeps for each block
    the last step that was in flight when the block was given back."""

    def __init__(self, num_blocks: int) -> None:
        self._num_planned = 0
        self._num_settled = 0
        self._fences = [0] * num_blocks
        self._waiting: dict[int, tuple[int, Start]] = {}  # by number of the request

    def planned(self) -> None:
        """A step that computes something is about to be launched."""
        self._num_planned += 1

    def settled(self) -> None:
        """The oldest step in flight is settled; start the loads that waited for it."""
        self._num_settled += 1
        for number, (fence, start) in list(self._waiting.items()):
            if fence <= self._num_settled:
                del self._waiting[number]
                start()

    def give_back(self, blocks: Sequence[int]) -> None:
        """These blocks are free from now on; each step in flight may still write them."""
        if self._num_planned > self._num_settled:
            for block in blocks:
                self._fences[block] = self._num_planned

    def when_written(self, number: int, blocks: Sequence[int], start: Start) -> None:
        """Call ``start``, for request ``number``, once no step in flight writes the blocks."""
        fence = max([self._fences[block] for block in blocks])
        if fence <= self._num_settled:
            start()
        else:
            self._waiting[number] = fence, start

    def cancel(self, number: int) -> bool:
        """Forget the pending start of this request; False if it has started, or had none."""
        return self._waiting.pop(number, None) is not None
