"""The shipped snapshot policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.kv.snapshots import KeptSnapshot
from engine.sched.plugins.checks import require_positive
from engine.sched.plugins.find import find_plugin
from engine.sched.request import Request
from engine.states.policy import SnapshotPolicy, SnapshotView, Take

MOST_PASSED = 1 << 16
FALLBACK = 0.05  # share of snapshots that are used though the request went on to a later one
DEFAULT_INTERVAL = 512  # tokens
FILLED = 0.5  # share of the pool with content from which on blocks are worth something


class ByCost(SnapshotPolicy):
    """Takes the snapshots that save more time than it takes to copy them, and drops those that save
    less than their blocks could if they held KV.

    Snapshots stay at the ends of prompts, where prompts divide, and at the interval. Elsewhere, the
    end of each block replaces the one before. A snapshot is passed when its request takes or uses a
    later one. From then on, while most of the pool has content, it stays only where prompts divide,
    if several requests have used it, or as a fallback after many tokens.

    ``per_request``: how many of the snapshots of a request that are not shared stay; 0.5: one of
    every second request."""

    def __init__(self, per_request: float = 1.0) -> None:
        require_positive(per_request=per_request)
        self.per_request = per_request
        self._passed: dict[bytes, None] = {}  # hashes, in the order in which they were passed

    def stop(self, req: Request, after: int, view: SnapshotView) -> int | None:
        return min((stop for stop in lasting(req, after, view) if stop > after), default=None)

    def takes(self, req: Request, num_tokens: int, view: SnapshotView) -> Take:
        if self._leaves_none(req):
            return Take.STAYS if num_tokens in view.branches(req) else Take.NO
        if num_tokens in lasting(req, num_tokens - 1, view):
            return Take.STAYS
        before = view.before(req, num_tokens)
        pays = view.compute_seconds(num_tokens - before, before) > view.copy_seconds
        return Take.UNTIL_NEXT if pays else Take.NO

    def victims(self, num_more: int, view: SnapshotView) -> Iterable[KeptSnapshot]:
        if view.pool_fill < FILLED:
            return
        passed, self._passed = self._passed, {}
        for block_hash in passed:
            kept = view.find(block_hash)
            if kept is not None and not _is_shared(kept, view):
                yield kept

    def used(self, known: Sequence[KeptSnapshot], view: SnapshotView) -> None:
        self._pass(known, view)

    def taken(self, known: Sequence[KeptSnapshot], view: SnapshotView) -> None:
        self._pass(known, view)

    def _leaves_none(self, req: Request) -> bool:
        """True if no snapshot of the request stays unless it is shared."""
        return self.per_request < 1 and req.arrival * self.per_request % 1 >= self.per_request

    def _pass(self, known: Sequence[KeptSnapshot], view: SnapshotView) -> None:
        """Note which of a request's snapshots need not stay."""
        held = view.compute_seconds(view.num_blocks * view.block_size, 0) + view.copy_seconds
        last = 0
        for kept in known[: -max(1, round(self.per_request))]:
            saved = view.compute_seconds(kept.num_tokens - last, last)
            if _is_shared(kept, view) or FALLBACK * saved > held:
                last = kept.num_tokens
            else:
                self._passed[kept.block_hash] = None
        while len(self._passed) > MOST_PASSED:
            del self._passed[next(iter(self._passed))]


class Marconi(SnapshotPolicy):
    """Takes snapshots where prompts divide and at the end of each request, as Marconi does (Pan et
    al., MLSys 2025).

    While the pool is full, the snapshots with the least utility are dropped: recency, plus
    ``alpha`` times the time saved for each block of states and KV, both scaled to 0 to 1. Marconi
    tunes ``alpha`` while it runs; here it is fixed. Snapshots that several requests have used are
    not dropped, as Marconi drops no node with several children."""

    def __init__(self, alpha: float = 1.0) -> None:
        require_positive("alpha", alpha=alpha)
        self.alpha = alpha

    def stop(self, req: Request, after: int, view: SnapshotView) -> int | None:
        stops = (*view.branches(req), last_full_block(req, view))
        return min((stop for stop in stops if stop > after), default=None)

    def takes(self, req: Request, num_tokens: int, view: SnapshotView) -> Take:
        if num_tokens in view.branches(req):
            return Take.STAYS
        return Take.UNTIL_NEXT if num_tokens >= last_full_block(req, view) else Take.NO

    def victims(self, num_more: int, view: SnapshotView) -> Iterable[KeptSnapshot]:
        if not view.is_pool_full:
            return ()
        kept = [each for each in view.kept if each.num_uses <= 1]
        efficiency = scaled([self._efficiency(each, view) for each in kept])
        recency = scaled([each.last_used for each in kept])
        utility = recency + self.alpha * efficiency
        return [kept[place] for place in utility.argsort(kind="stable")[:num_more]]

    def _efficiency(self, kept: KeptSnapshot, view: SnapshotView) -> float:
        """Seconds that the snapshot saves, for each block that it and the KV before it take."""
        seconds = view.compute_seconds(kept.num_saved, kept.num_tokens - kept.num_saved)
        return seconds / (view.num_blocks + kept.num_saved // view.block_size)


class Interval(SnapshotPolicy):
    """Takes a snapshot every ``tokens`` tokens. The least recently used ones are evicted, as in
    vLLM with ``mamba_cache_mode="all"``.

    ``tokens``: rounded up to full blocks; by default the option ``state_snapshot_interval`` or,
    without it, 512."""

    def __init__(self, tokens: int = 0) -> None:
        require_positive("tokens", tokens=tokens)
        self.tokens = tokens

    def stop(self, req: Request, after: int, view: SnapshotView) -> int | None:
        every = self._every(view)
        return (after // every + 1) * every

    def takes(self, req: Request, num_tokens: int, view: SnapshotView) -> Take:
        return Take.NO if num_tokens % self._every(view) else Take.STAYS

    def _every(self, view: SnapshotView) -> int:
        tokens = self.tokens or view.interval or DEFAULT_INTERVAL
        return -(-tokens // view.block_size) * view.block_size


POLICIES: dict[str, type[SnapshotPolicy]] = {
    "cost": ByCost,
    "interval": Interval,
    "marconi": Marconi,
}
POLICIES_GROUP = "engine.snapshot_policies"  # entry points: SnapshotPolicy classes


def find_snapshot_policy(name: Any, options: dict[str, Any] | None = None) -> SnapshotPolicy:
    """Create a snapshot policy from its name, dotted path or class, with ``options`` as arguments
    of its constructor; return an object unchanged. Raises ``ConfigError``."""
    return find_plugin(
        "state_snapshot_policy",
        name,
        SnapshotPolicy,  # type: ignore[type-abstract]
        POLICIES,
        POLICIES_GROUP,
        options,
    )


def lasting(req: Request, after: int, view: SnapshotView) -> Iterator[int]:
    """Numbers of tokens, some of them above ``after``, at which snapshots stay by default: at the
    last end of a block before the prompt's last token, from which the same prompt starts again; at
    the end of the prompt's last full block, from which a longer prompt starts; where prompts
    divide; and at multiples of the interval."""
    size = view.block_size
    if after < req.num_prompt:
        yield (req.num_prompt - 1) // size * size
        yield last_full_block(req, view)
        yield from view.branches(req)
    if view.interval:
        yield (after // view.interval + 1) * view.interval


def last_full_block(req: Request, view: SnapshotView) -> int:
    """Number of tokens of the request's prompt up to the end of its last full block."""
    return req.num_prompt // view.block_size * view.block_size


def _is_shared(kept: KeptSnapshot, view: SnapshotView) -> bool:
    """True if a snapshot stays though its request has a later one."""
    at_interval = view.interval > 0 and kept.num_tokens % view.interval == 0
    return at_interval or kept.is_branch or kept.num_uses > 1


def scaled(values: Sequence[float]) -> NDArray[np.float64]:
    """The values on a scale from 0 (the least) to 1 (the greatest)."""
    found = np.array(values, dtype=np.float64)
    if not found.size:
        return found
    spread = found.max() - found.min()
    return (found - found.min()) / spread if spread else np.zeros_like(found)
