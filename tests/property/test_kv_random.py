"""The KV manager and a naive model of it agree, under random calls, on held and cached blocks.

The model knows blocks by their content (adapter, salt and all tokens up to their end) and finds
hits by comparing whole beginnings, without hashes.
"""

from __future__ import annotations

import random

import pytest
from support.holders import holder

from engine.kv.fast_hash import FastHasher
from engine.kv.manager import KVManager
from engine.kv.prefix_index import Sha256Hasher
from engine.messages.requests import MediaItem


class Model:
    """A manager and what it should be: contents of cached blocks, and holders."""

    def __init__(self, rng: random.Random, hasher) -> None:
        self.rng = rng
        self.size = rng.choice([1, 2, 3, 4])
        self.kv = KVManager(rng.randint(4, 30), self.size, hasher=hasher)
        self.live: dict[int, object] = {}
        self.cached: dict[int, tuple] = {}  # block -> content
        self.num_added = 0
        self.shared = [rng.randrange(3) for _ in range(40)]

    def content(self, req, num_blocks: int) -> tuple:
        upto = num_blocks * self.size
        media = tuple(item for item in req.media if item.offset < upto)
        return req.adapter, req.cache_salt, media, tuple(req.tokens[:upto])

    def hit(self, req) -> int:
        """Blocks of the longest cached beginning."""
        known, found = set(self.cached.values()), 0
        if req.reads_cache:
            while (found + 1) * self.size < len(req.tokens) and (
                self.content(req, found + 1) in known
            ):
                found += 1
        return found

    # -- moves

    def add(self) -> None:
        rng, row = self.rng, next(row for row in range(64) if row not in self.live)
        length = rng.randint(1, 40)
        common = rng.randint(0, length)
        self.num_added += 1
        self.live[row] = holder(
            row,
            self.shared[:common] + [rng.randrange(3) for _ in range(length - common)],
            request_id=f"{self.num_added % 5}-{row}",
            adapter=rng.choice([None, None, "lora"]),
            cache_salt=rng.choice([None, None, "salt"]),
            media=rng.choice([[], [], [MediaItem(3, 2, "cat")], [MediaItem(3, 2, "dog")]]),
            reads_cache=rng.random() < 0.9,
        )

    def reserve(self, req) -> None:
        kv, rng = self.kv, self.rng
        first = kv.ready(req) + 1 if not kv.held(req) else 1
        upto = rng.randint(min(first, len(req.tokens)), len(req.tokens))
        before, free, hit = list(kv.held(req)), kv.pool.free_order(), kv.lookup(req)
        missing = kv.missing(req, upto)
        assert kv.fits(req, upto) == (missing <= len(free))
        if not kv.reserve(req, upto):
            assert missing > len(free) and kv.held(req) == before
            assert kv.pool.free_order() == free
            return
        start = before or hit.blocks
        assert kv.held(req)[: len(start)] == start and len(free) - kv.num_free == missing
        taken = kv.held(req)[len(start) :]
        assert taken == [block for block in free if block not in start][: len(taken)]
        for block in taken:
            self.cached.pop(block, None)
        req.num_computed = max(req.num_computed, len(start) * self.size * (not before))

    def evict(self, req) -> None:
        """Others make room: what was promised for that case comes true."""
        others = [o for o in self.live.values() if o is not req]
        victims = self.rng.sample(others, self.rng.randint(0, len(others)))
        upto = range(self.kv.cached_prefix(req) + 1, len(req.tokens) + 1)
        promised = [self.kv.fits(req, end, victims) for end in upto]
        for victim in victims:
            self.release(victim)
        assert [self.kv.fits(req, end) for end in upto] == promised

    def commit(self, req) -> None:
        room = min(len(self.kv.held(req)) * self.size, len(req.tokens))
        if room <= req.num_computed:
            return
        upto = self.rng.randint(req.num_computed, room)
        self.kv.commit(req, upto)
        self.publish(req, upto)

    def publish(self, req, upto: int) -> None:
        req.num_computed = max(req.num_computed, upto)
        for index in range(self.kv.num_adopted(req), upto // self.size):
            self.cached[self.kv.held(req)[index]] = self.content(req, index + 1)

    def grow(self, req) -> None:
        held = self.kv.held(req)
        full = len(held) * self.size
        if held and full < 60 and self.kv.num_free:
            req.tokens.extend([1] * max(0, full + 1 - len(req.tokens)))
            block = self.kv.pool.free_order()[0]
            self.kv.reserve_next([req.row])
            assert self.kv.held(req)[-1] == block
            self.cached.pop(block, None)

    def release(self, req) -> None:
        self.kv.release(req)
        req.num_computed = 0

    def forget(self, req) -> None:
        self.kv.finish(req)
        del self.live[req.row]

    def reset(self) -> None:
        idle = not any(self.kv.held(req) for req in self.live.values())
        assert self.kv.reset_prefix_cache() == idle
        if idle:
            self.cached.clear()

    # -- what must hold

    def check(self) -> None:
        kv = self.kv
        refs = [0] * kv.num_blocks
        for req in self.live.values():
            for block in kv.held(req):
                refs[block] += 1
        assert refs == kv.pool.num_refs and refs[0] == 0
        free = kv.pool.free_order()
        assert len(free) == kv.num_free
        assert sorted(free) == [b for b in range(1, kv.num_blocks) if refs[b] == 0]
        assert {b for b, h in enumerate(kv.cache.hashes) if h is not None} == set(self.cached)
        for row, req in self.live.items():
            assert kv.num_held[row] == len(kv.held(req))
            hit = self.hit(req)
            assert kv.cached_prefix(req) == hit * self.size
            for index, block in enumerate(kv.lookup(req).blocks):
                assert self.cached[block] == self.content(req, index + 1)


@pytest.mark.parametrize("hasher", [Sha256Hasher, lambda: FastHasher(3)], ids=["sha256", "fast"])
def test_the_manager_agrees_with_a_naive_model(hasher, seed):
    for turn in range(25):
        rng = random.Random(seed + turn)
        model = Model(rng, hasher())
        moves = [model.reserve] * 6 + [model.commit] * 4 + [model.grow, model.grow]
        moves += [model.evict, model.release, model.forget]
        for _ in range(150):
            if len(model.live) < 6 and rng.random() < 0.3:
                model.add()
            elif rng.random() < 0.03:
                model.reset()
            elif model.live:
                rng.choice(moves)(rng.choice(list(model.live.values())))
            model.check()
        for req in list(model.live.values()):
            model.forget(req)
        model.check()
        assert model.kv.num_free == model.kv.num_usable, f"seed {seed + turn}"
