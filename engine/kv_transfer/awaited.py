"""Awaited: requests that wait until stores outside the pool have the blocks of their prompts.

Another core computes such a prompt and stores its blocks (``engine.rpc.apart``). A request
gives the longest wait as ``kv_transfer_params={"await_blocks": seconds}``. When stores have all of
its blocks, or after that time, it is scheduled as any other request: what pays is loaded, the rest
is computed. Step logs record in which step each wait ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from engine.kv.manager import KVManager
from engine.messages.params import is_finite
from engine.sched.request import Request

AWAIT_BLOCKS = "await_blocks"  # key in ``kv_transfer_params``
MOST_SECONDS = 3600.0
RETRY_SECONDS = 0.01  # between two searches for all blocks of a prompt


def seconds_of(params: dict[str, Any] | None) -> float | None:
    """How long a request waits for blocks at most; ``None`` if it does not wait."""
    value = None if params is None else params.get(AWAIT_BLOCKS)
    return None if value is None else float(value)


def objection(params: dict[str, Any] | None) -> str | None:
    """What is wrong with the wait that a request wants; ``None`` if nothing is."""
    value = None if params is None else params.get(AWAIT_BLOCKS)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (is_number and is_finite(value) and 0 <= value <= MOST_SECONDS):
        return None
    return (
        f"{AWAIT_BLOCKS} in kv_transfer_params is {value!r:.80}, must be a number of seconds in "
        f"0..{MOST_SECONDS:g}; leave it out to wait for no blocks"
    )


@dataclass(slots=True)
class Wait:
    """A wait for the blocks of a prompt. ``until``: on the engine's clock."""

    req: Request
    until: float
    is_parked: bool = False
    keys: list[bytes] = field(default_factory=list)  # that the pool lacked when they were computed
    adapter: str | None = None  # at that time: keys depend on it
    retry_at: float = 0.0


class Awaited:
    """The requests that wait for blocks. ``contains``: which of these keys some store has."""

    def __init__(self, kv: KVManager, contains: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._kv = kv
        self._contains = contains
        self._waits: dict[int, Wait] = {}  # by arrival number

    def __contains__(self, req: Request) -> bool:
        return req.arrival in self._waits

    def add(self, req: Request, now: float) -> None:
        """Let a new request wait, if it wants to."""
        seconds = seconds_of(req.add.kv_transfer_params)
        if seconds is not None:
            self._waits[req.arrival] = Wait(req, now + seconds)

    def park(self, req: Request) -> None:
        """Note that a request was parked because it waits."""
        self._waits[req.arrival].is_parked = True

    def end(self, req: Request) -> bool:
        """End a wait, if there is one. Returns whether the request was parked because of it."""
        wait = self._waits.pop(req.arrival, None)
        return wait is not None and wait.is_parked

    def stop(self, request_ids: Sequence[str]) -> None:
        """End the waits of these requests in the next step; unknown ids are ignored."""
        names = set(request_ids)
        for wait in self._waits.values():
            if wait.req.request_id in names:
                wait.until = -inf

    def over(self, now: float) -> list[tuple[Request, bool]]:
        """The requests whose waits are over, and whether their blocks have come."""
        ended = []
        for wait in self._waits.values():
            if self._has_come(wait, now):
                ended.append((wait.req, True))
            elif now >= wait.until:
                ended.append((wait.req, False))
        return ended

    def recorded(self, is_over: Callable[[str], bool]) -> list[Request]:
        """In a replay: the requests whose waits have ended in this step of the recorded run."""
        return [wait.req for wait in self._waits.values() if is_over(wait.req.request_id)]

    def _has_come(self, wait: Wait, now: float) -> bool:
        """True if the whole prefix of a prompt is in the pool or in stores. Called in each step:
        all keys are searched only once the last one, which is stored last, was found."""
        kv, req = self._kv, wait.req
        if not wait.keys or wait.adapter != req.add.adapter:
            wait.keys, wait.adapter = kv.outside_keys(req), req.add.adapter
        keys = wait.keys
        if keys and (now < wait.retry_at or not self._has_some(keys[-1:])):
            return False
        wait.retry_at = now + RETRY_SECONDS
        keys = kv.outside_keys(req)
        found = {key for key, is_there in zip(keys, self._contains(keys), strict=True) if is_there}
        whole = (req.num_prompt - 1) // kv.block_size * kv.block_size
        return not keys or kv.wanted(req, found).num_tokens >= whole

    def _has_some(self, keys: list[bytes]) -> bool:
        return self._kv.cache.find(keys[0]) is not None or any(self._contains(keys))
