"""LoadChoices: which KV blocks the scheduler has chosen to load from outside the pool.

Which stores have a block, and whether loading is faster than computing, is not known in a replay of
a step log. So the log has each choice."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class LoadChoice(NamedTuple):
    """What is loaded for a request. ``stores``: for each key that the request could use, in the
    order of ``KVManager.outside_keys``, the index of the store that it is loaded from, or
    ``NOT_LOADED``. Empty: its wait for blocks has ended (``engine.kv_transfer.awaited``)."""

    step: int  # number of the step in which it was chosen
    request_id: str
    stores: bytes


NOT_LOADED = 255


class LoadChoices:
    """The choices since they were taken last, and those that a log has recorded."""

    def __init__(self) -> None:
        self.made: deque[LoadChoice] = deque(maxlen=1 << 16)
        self._expected: dict[tuple[int, str], LoadChoice] = {}

    def take(self) -> list[LoadChoice]:
        """Return the choices made since the last call."""
        made = list(self.made)
        self.made.clear()
        return made

    def expect(self, choice: LoadChoice) -> None:
        """In a replay: note a recorded choice."""
        self._expected[choice.step, choice.request_id] = choice

    def expected(self, step: int, request_id: str) -> LoadChoice | None:
        """In a replay: the last choice for a request in this step, if there was one."""
        return self._expected.get((step, request_id))
