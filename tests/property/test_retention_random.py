"""Random calls of the pool of a cache policy, next to a naive model of the order of free blocks."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from math import inf

import msgspec
import pytest

from engine.kv.retention import Keep, ShelvedPool
from policylab.verify.draw import draw_case
from policylab.verify.simulation import Simulation

WRONG = "policylab.verify.wild.WrongCache"


class Model:
    """The pool's blocks in one list, from the first to be taken to the last."""

    def __init__(self, num_blocks: int, most_pinned: int) -> None:
        self.free = list(range(1, num_blocks))
        self.content: dict[int, bytes] = {}
        self.refs = [0] * num_blocks
        self.keeps: dict[int, tuple[Keep, bool, int]] = {}  # with: is pinned, number of the call
        self.first: set[int] = set()  # over an owner's limit
        self.pinned: set[int] = set()  # free blocks
        self.now = 0.0
        self.most_pinned = most_pinned
        self.num_calls = 0

    def level(self, block: int) -> tuple[int, float]:
        if block not in self.content and block not in self.keeps and block not in self.first:
            return 0, 0.0
        keep = self.keeps.get(block)
        if block in self.pinned:
            return 2, keep[0].priority
        return 1, -inf if block in self.first else keep[0].priority if keep else 0.0

    def order(self) -> list[int]:
        return sorted(self.free, key=self.level)

    def expire(self) -> None:
        pins = {call: keep.until for keep, is_pin, call in self.keeps.values() if is_pin}
        for call in sorted((c for c in pins if pins[c] <= self.now), key=lambda c: (pins[c], c)):
            members = [
                b for b, (_, is_pin, other) in self.keeps.items() if is_pin and other == call
            ]
            for block in members:
                self.keeps[block] = (self.keeps[block][0], False, call)
                if block in self.free:
                    self.pinned.discard(block)
                    self.to_end(block)

    def to_end(self, block: int) -> None:
        self.free.remove(block)
        self.free.append(block)

    def take(self, count: int) -> list[int]:
        self.expire()
        taken = self.order()[:count]
        for block in taken:
            self.free.remove(block)
            self.forget(block)
            self.content.pop(block, None)
            self.refs[block] = 1
        return taken

    def forget(self, block: int) -> None:
        self.keeps.pop(block, None)
        self.first.discard(block)
        self.pinned.discard(block)

    def adopt(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
                self.pinned.discard(block)
                self.first.discard(block)
            self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        freed = []
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                freed.append(block)
                if block in self.content:
                    self.free.append(block)
                else:
                    self.forget(block)
                    self.free.insert(0, block)
        for block in freed:
            is_pin = block in self.keeps and self.keeps[block][1]
            if is_pin and len(self.pinned) < self.most_pinned:
                self.pinned.add(block)

    def may_place(self, block: int, keep: Keep) -> bool:
        old, is_pin, _ = self.keeps.get(block, (keep, False, 0))
        is_weaker = is_pin and old.owner != keep.owner and old.until > keep.until
        return block in self.content and not is_weaker

    def keep(self, blocks: list[int], keep: Keep) -> None:
        self.expire()
        mine = [block for block in blocks if self.may_place(block, keep)]
        for block in mine:
            self.forget(block)
        num_pins = 0
        if keep.until > self.now:
            num_pins = max(0, self.most_pinned - len(self.pinned))
        for place, block in reversed(list(enumerate(mine))):
            self.num_calls += place == num_pins - 1  # pinned blocks are a call of their own
            self.keeps[block] = (keep, place < num_pins, self.num_calls)
            if block in self.free:
                self.to_end(block)
                if place < num_pins:
                    self.pinned.add(block)
        self.num_calls += 1
        if keep.most is not None:
            self.cut(keep)

    def cut(self, keep: Keep) -> None:
        own = [
            block
            for block, (other, _, _) in self.keeps.items()
            if other.owner == keep.owner and other.most is not None
        ]
        own.sort(key=lambda block: self.keeps[block][2])
        for block in own[: max(0, len(own) - keep.most)]:
            self.forget(block)
            if block in self.free:
                self.to_end(block)
                self.first.add(block)


def random_keep(rng: random.Random, now: float) -> Keep:
    return Keep(
        priority=rng.choice([0.0, 0.0, 1.0, -1.0, 2.5, -inf, inf]),
        until=rng.choice([-inf, now, now + rng.randrange(1, 9), now + 3, inf]),
        owner=rng.choice(["", "a", "b"]),
        most=rng.choice([None, None, 0, 2, 5]),
    )


@pytest.mark.parametrize("seed", range(100))
def test_blocks_are_taken_in_the_order_of_a_naive_model(seed: int):
    rng = random.Random(seed)
    num_blocks = rng.randint(3, 24)
    pool, model = ShelvedPool(num_blocks), Model(num_blocks, rng.randint(0, num_blocks))
    pool.most_pinned = model.most_pinned
    tables: list[list[int]] = []
    for number in range(250):
        dice = rng.random()
        if dice < 0.35 and pool.num_free:
            count = rng.randint(1, pool.num_free)
            taken = pool.take(count)
            assert taken == model.take(count), f"seed {seed}, call {number}"
            named = [block for block in taken if rng.random() < 0.8]
            keys = [b"%d.%d" % (number, block) for block in named]
            pool.cache.publish_each(named, keys)
            model.content.update(zip(named, keys, strict=True))
            tables.append(taken)
        elif dice < 0.5 and model.content:
            shared = [block for block in sorted(model.content) if rng.random() < 0.3]
            pool.adopt(shared)
            model.adopt(shared)
            tables.append(shared)
        elif dice < 0.85 and tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.release(table)
            model.release(table)
            if rng.random() < 0.8:
                keep = random_keep(rng, model.now)
                pool.keep(table, keep)
                model.keep(table, keep)
        elif dice < 0.95:
            model.now = pool.cache.evictions.now = model.now + rng.choice([0.0, 1.0, 2.0, -1.0])
            pool.expire()
        model.expire()
        assert pool.num_pinned == len(model.pinned) <= model.most_pinned, f"seed {seed}"
        assert pool.free_order() == model.order(), f"seed {seed}, call {number}"
        assert pool.num_free == len(model.free)
        head = model.order()[:1]
        assert pool.evicts == (bool(head) and head[0] in model.content)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_wrong_cache_policy_hurts_no_request(first: int, caplog: pytest.LogCaptureFixture):
    """One that raises, returns nonsense, or pins all blocks for ever."""
    caplog.set_level(logging.CRITICAL, "engine")
    for seed in range(first, first + 20):
        setup = (case := draw_case(seed)).setup
        config = replace(setup.config, cache_policy=WRONG, max_policy_faults=seed % 3 * 1000)
        setup = msgspec.structs.replace(setup, config=config, caching=True)
        case = msgspec.structs.replace(case, setup=setup)
        try:
            Simulation(case, every=4, leaks=False, plugins=False).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
