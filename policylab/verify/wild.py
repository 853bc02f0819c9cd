"""Policies that give random but valid answers, to test all parts of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf, nan
from random import Random
from typing import Any

from engine.kv.retention import Keep
from engine.kv.snapshots import KeptSnapshot
from engine.sched.cache_policy import CachePolicy
from engine.sched.policy import Admission, Defer, Limits, Policy, Refuse, SchedView, Verdict
from engine.sched.request import Request
from engine.states.policy import SnapshotPolicy, SnapshotView, Take


class Wild(Policy):
    """A policy whose hooks answer at random with probability ``rate`` (0 to 1), else by default.

    It evicts no request twice, so every request ends. It raises ``AssertionError`` if the scheduler
    does not follow its answers."""

    dynamic = True
    waiting_may_preempt = True
    uses_ledger = True

    def __init__(self, rate: float = 0.2) -> None:
        self.rate = rate
        self.index = -1  # step of the answers below
        self.bounds = Limits()
        self.tokens_left = self.most_running = 0
        self.evicted: list[Request] = []
        self.evicted_at = -1
        self.named: set[Request] = set()
        self.allowed: dict[Request, int] = {}

    def odd(self, view: SchedView) -> bool:
        """True with probability ``rate``; the calling hook then answers at random."""
        return view.rng.random() < self.rate

    def rank(self, req: Request, view: SchedView) -> tuple[int, int]:
        return (view.rng.randrange(3) if self.odd(view) else 1, req.arrival)

    def limits(self, view: SchedView) -> Limits:
        rng, self.index = view.rng, view.step.index
        self.bounds = Limits()
        if self.odd(view):
            seqs, tokens = rng.choice((None, 0, 1, 3)), rng.choice((None, 0, 1, 7))
            self.bounds = Limits(tokens, seqs, rng.random() < 0.5)
        self.tokens_left = view.config.max_num_batched_tokens
        if self.bounds.max_tokens is not None:
            self.tokens_left = min(self.tokens_left, self.bounds.max_tokens)
        self.most_running = view.config.max_num_seqs
        if self.bounds.max_seqs is not None:  # another request may replace a running one
            self.most_running = max(self.bounds.max_seqs, len(view.running))
        self.named.clear()
        self.allowed.clear()
        return self.bounds

    def evict(self, view: SchedView) -> Iterable[Request]:
        self.evicted_at = view.step.index
        self.evicted = [req for req in view.running if not req.num_preempted and self.odd(view)]
        return self.evicted

    def order(self, view: SchedView) -> Iterator[Request]:
        assert self.evicted_at == view.step.index, "evict was not called in this step"
        assert all(req.is_waiting for req in self.evicted), f"{self.evicted} must be evicted"
        named = [req for req in (*view.running, *view.waiting) if not self.odd(view)]
        if self.odd(view):
            view.rng.shuffle(named)
        self.named.update(named)
        yield from named

    def admit(self, req: Request, view: SchedView) -> Admission:
        answer = super().admit(req, view)
        if self.odd(view):
            answer = view.rng.choice((Admission.SKIP, Admission.CLOSE, Admission.YES))
        if answer is not Admission.YES:
            self.allowed[req] = 0
        return answer

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        answer = view.rng.randint(0, num_tokens) if self.odd(view) else num_tokens
        self.allowed[req] = answer
        return answer

    def victim(
        self, candidates: Sequence[Request], req: Request, view: SchedView
    ) -> Request | None:
        assert req not in candidates, f"{req} may evict itself"
        assert all(other.considered != view.step.index for other in candidates), (
            "a candidate was considered before"
        )
        return view.rng.choice((*candidates, None)) if self.odd(view) else candidates[-1]

    def on_add(self, req: Request, view: SchedView) -> Verdict:
        if not self.odd(view):
            return None
        return view.rng.choice((Refuse("a whim"), Defer(view.now + view.rng.randrange(64) / 64)))

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        if view.step.index != self.index:  # the default order replaced the answers
            return
        assert req in self.named, f"{req} was not named in order, but got tokens"
        allowed = self.allowed.get(req, num_tokens)
        if allowed and not view.config.enable_chunked_prefill:
            allowed = max(allowed, num_tokens)  # a prompt is not cut
        assert num_tokens <= allowed, f"{req} got {num_tokens} tokens, {allowed} were allowed"
        self.tokens_left -= num_tokens
        assert self.tokens_left >= 0, "more tokens than limits allows were granted"
        if req in view.step.new:
            assert self.bounds.admission, f"{req} started although admission was closed"
            assert len(view.running) <= self.most_running, f"{req} is one too many to run"

    def on_finish(self, req: Request, view: SchedView) -> None:
        self.allowed.pop(req, None)
        self.named.discard(req)
        self.evicted = [other for other in self.evicted if other is not req]


class WildSnapshots(SnapshotPolicy):
    """A snapshot policy that ends chunks, takes snapshots and drops them at random. It raises
    ``AssertionError`` if the snapshots that it is called with are not cached or not in order."""

    def __init__(self) -> None:
        self._rng = Random(0)

    def stop(self, req: Request, after: int, view: SnapshotView) -> int | None:
        size = view.block_size  # the result must not change from call to call
        dice = Random(req.arrival * 1_000_003 + after // size)
        return None if dice.random() < 0.5 else (after // size + dice.randint(1, 3)) * size

    def takes(self, req: Request, num_tokens: int, view: SnapshotView) -> Take:
        return self._rng.choice(list(Take))

    def victims(self, num_more: int, view: SnapshotView) -> Iterable[KeptSnapshot]:
        return [kept for kept in view.kept if self._rng.random() < 0.1]

    def used(self, known: Sequence[KeptSnapshot], view: SnapshotView) -> None:
        assert known[-1].num_uses, f"{known[-1]} is used"
        self.taken(known, view)

    def taken(self, known: Sequence[KeptSnapshot], view: SnapshotView) -> None:
        assert known == sorted(known, key=lambda kept: kept.num_tokens), f"{known} are in order"
        assert all(view.find(kept.block_hash) is kept for kept in known), f"{known} are cached"


class WildCache(CachePolicy):
    """A cache policy that keeps blocks at random, some of them pinned for ever."""

    max_pinned = 0.2

    def keep(self, req: Request, has_ended: bool, view: SchedView) -> Keep | None:
        assert view.kv.held(req), f"{req} has no blocks"
        rng = view.rng
        if rng.random() < 0.3:
            return None
        return Keep(
            priority=rng.choice((0.0, 0.0, -1.0, 1.0, rng.random(), -inf, inf)),
            until=rng.choice((0.0, view.now + rng.randrange(1, 64) / 64, inf)),
            owner=rng.choice(("", req.user, "other")),
            most=rng.choice((None, None, 0, view.kv.num_usable // 3)),
        )


class WrongCache(WildCache):
    """A cache policy that raises or returns an invalid value half of the time."""

    max_pinned = 1.0

    def keep(self, req: Request, has_ended: bool, view: SchedView) -> Any:
        dice = view.rng.randrange(12)
        if dice == 0:
            raise RuntimeError("a whim")
        wrong = (Keep(nan), Keep(until=nan), Keep("1"), Keep(owner=1), Keep(most=-1), 1)  # type: ignore[arg-type]
        return wrong[dice - 1] if dice <= len(wrong) else super().keep(req, has_ended, view)
