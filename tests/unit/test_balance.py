"""Which of several cores gets a request."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from support.holders import fill, holder
from support.simulate import make_request

from engine.config.args import EngineArgs
from engine.config.kv_groups import Group
from engine.kv.fast_hash import FastHasher
from engine.kv.manager import KVManager
from engine.messages.requests import MediaItem
from engine.messages.stats import GroupUse, SchedulerStats
from engine.messages.wire import CacheNews
from engine.rpc.balance import Balancer
from engine.rpc.joined import DeadCounters, sum_of
from engine.rpc.launch import share_of
from engine.rpc.work import MOST_OUTPUT

SYSTEM = list(range(64))  # what several prompts begin with: 4 blocks


class Core:
    """The prefix cache of a core, and what its clients are sent about it."""

    def __init__(self, num_blocks: int = 100, size: int = 16, **options: Any) -> None:
        self.kv = KVManager(num_blocks, size, **options)
        changes = self.kv.follow_cache()
        assert changes is not None
        self.changes = changes

    def news(self, load: int = 0) -> CacheNews:
        """What has changed since the last call."""
        return CacheNews(1, *self.changes.take(), load)

    def whole(self, load: int = 0) -> CacheNews:
        self.changes.take()
        return CacheNews(0, True, self.changes.whole(), b"", load, self.changes.secret)

    def run(self, prompt: list[int], **fields: Any) -> None:
        """Compute a prompt and leave it in the cache."""
        req = holder(0, prompt, **fields)
        fill(self.kv, req)
        self.kv.finish(req)


def test_strangers_go_where_least_is_to_be_done() -> None:
    balancer = Balancer(3, 16)
    sizes = [100, 10, 10, 10, 50, 5]
    chosen = [balancer.choose(make_request(str(i), [i] * 16, size)) for i, size in enumerate(sizes)]
    assert chosen == [0, 1, 2, 1, 2, 1]


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    balancer, cores = Balancer(3, 16), [Core() for _ in range(3)]
    cores[2].run([*SYSTEM, *range(100)])
    cores[1].run(SYSTEM[:32])
    for index, core in enumerate(cores):
        balancer.update(index, core.whole())
    assert balancer.choose(make_request("a", [*SYSTEM, 1, 2], 1)) == 2
    balancer.end("a")
    assert balancer.choose(make_request("b", SYSTEM[:40], 1)) == 1  # it has stored less lately
    balancer.end("b")
    assert balancer.choose(make_request("c", [7, *SYSTEM], 1)) == 0


def test_what_is_evicted_is_forgotten() -> None:
    balancer, cores = Balancer(2, 16), [Core(num_blocks=11), Core(num_blocks=11)]
    cores[1].run(SYSTEM)
    balancer.update(1, cores[1].whole())
    assert balancer.choose(make_request("a", SYSTEM, 1)) == 1
    balancer.end("a")
    cores[1].run([9] * 160)  # takes all ten blocks
    balancer.update(1, cores[1].news())
    assert balancer.choose(make_request("b", SYSTEM, 1)) == 0
    balancer.end("b")
    cores[1].run(SYSTEM)
    balancer.update(1, cores[1].news())
    assert balancer.choose(make_request("c", SYSTEM, 1)) == 1
    balancer.end("c")
    assert cores[1].kv.reset_prefix_cache()
    balancer.update(1, cores[1].news())
    assert balancer.choose(make_request("d", SYSTEM, 1)) == 0


def test_a_burst_with_one_beginning_goes_to_one_core() -> None:
    """They do while computing the beginning again costs more than waiting."""
    balancer, long = Balancer(4, 16), list(range(2000))
    balancer.choose(make_request("other", [7] * 500, 10))
    chosen = [balancer.choose(make_request(str(i), [*long, i], 10)) for i in range(50)]
    assert set(chosen) == {1}
    for i in range(50):
        balancer.end(str(i))
    assert balancer.choose(make_request("again", long, 10)) == 1  # it has no other work
    balancer.end("again")
    balancer.choose(make_request("busy", [8] * 900, 10))
    assert balancer.choose(make_request("later", long, 10)) == 2  # the core never stored it


def test_a_favourite_that_has_too_much_to_do_is_passed() -> None:
    balancer = Balancer(2, 16)
    cores = [balancer.choose(make_request(str(i), SYSTEM, 400)) for i in range(20)]
    assert set(cores) == {0, 1}
    assert max(balancer.loads) - min(balancer.loads) <= 2 * (64 + MOST_OUTPUT)


def test_a_computed_prompt_is_no_work_any_more() -> None:
    balancer = Balancer(2, 16)
    balancer.choose(make_request("a", [1] * 1000, 20))
    assert balancer.loads == [1020, 0]
    balancer.start("a")
    balancer.start("a")
    assert balancer.loads == [20, 0]
    balancer.end("a")
    assert balancer.loads == [0, 0]


def test_front_ends_see_each_others_load() -> None:
    balancer, core = Balancer(2, 16), Core()
    balancer.update(0, core.news(load=5000))
    assert [balancer.choose(make_request(str(i), [i] * 90, 10)) for i in range(9)] == [1] * 9
    balancer.update(0, core.news(load=0))
    assert balancer.choose(make_request("a", [77] * 90, 10)) == 0


def test_other_salts_adapters_and_media_share_nothing() -> None:
    balancer, cores = Balancer(2, 16), [Core(), Core()]
    cores[1].run(SYSTEM, cache_salt="x")
    balancer.update(1, cores[1].whole())
    balancer.adapters = {"sql": "digest"}
    for other in ({}, {"cache_salt": "y"}, {"cache_salt": "x", "adapter": "sql"}):
        assert balancer.choose(make_request("a", SYSTEM, 1, **other)) == 0
        balancer.end("a")
    image = {"cache_salt": "x", "media": [MediaItem(0, 4, "image")]}
    assert balancer.choose(make_request("b", SYSTEM, 1, **image)) == 0
    balancer.end("b")
    assert balancer.choose(make_request("c", SYSTEM, 1, cache_salt="x")) == 1
    balancer.end("c")
    cores[1].run([5] * 64, adapter="digest")
    balancer.update(1, cores[1].news())
    assert balancer.choose(make_request("d", [5] * 64, 1, adapter="sql")) == 1


def test_adapters_that_others_have_loaded_are_known() -> None:
    balancer, core = Balancer(2, 16), Core()
    core.run(SYSTEM, adapter="digest")
    balancer.update(1, msgspec.structs.replace(core.whole(), adapters={"sql": "digest"}))
    assert balancer.choose(make_request("a", SYSTEM, 1, adapter="sql")) == 1


def test_the_fast_hash_of_each_core_is_used() -> None:
    balancer, cores = Balancer(2, 16), [Core(), Core(hasher=FastHasher(5))]
    for index, core in enumerate(cores):
        balancer.update(index, core.whole())
    cores[1].run(SYSTEM)
    balancer.update(1, cores[1].news())
    assert balancer.choose(make_request("a", SYSTEM, 1)) == 1
    balancer.end("a")
    cores[0].run([3] * 64)
    balancer.update(0, cores[0].news())
    assert balancer.choose(make_request("b", [3] * 64, 1)) == 0


def test_blocks_of_full_attention_count() -> None:
    groups = [Group(window=16), Group()]
    balancer, core = Balancer(2, 16), Core(num_blocks=30, groups=groups)
    core.run(SYSTEM)
    balancer.update(1, core.whole())
    assert len(core.changes.whole()) == 4 * 8
    assert balancer.choose(make_request("a", SYSTEM, 1)) == 1


def test_a_core_that_starts_again_has_nothing() -> None:
    balancer, core = Balancer(2, 16), Core()
    core.run(SYSTEM)
    balancer.update(1, core.whole(load=7))
    assert balancer.choose(make_request("a", SYSTEM, 9)) == 1
    assert balancer.remove(1) == ["a"] and balancer.core_of("a") is None
    assert not balancer.cached(1) and balancer.loads == [0, 0]
    assert balancer.choose(make_request("b", SYSTEM, 9)) == 0
    balancer.restore(1)
    assert balancer.choose(make_request("c", SYSTEM, 9)) == 0
    assert balancer.choose(make_request("d", [4] * 90, 9)) == 1


def test_new_prompts_go_where_least_is_stored() -> None:
    balancer, cores = Balancer(3, 16), [Core(), Core(), Core()]
    for index, num_blocks in enumerate((9, 5, 7)):
        cores[index].run([index + 1] * (16 * num_blocks))
        balancer.update(index, cores[index].whole())
    assert balancer.choose(make_request("a", [70] * 40, 1)) == 1


class Situation:
    """Two front ends over three cores that evict, are cleared and die."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.cores = [Core(num_blocks=12, size=4) for _ in range(3)]
        self.front_ends = [Balancer(3, 4) for _ in range(2)]
        self.live: list[dict[str, int]] = [{}, {}]

    def add(self, name: str) -> None:
        which = self.dice.randrange(2)
        prompt = [self.dice.randrange(2) for _ in range(self.dice.randint(1, 30))]
        request = make_request(name, prompt, self.dice.randint(1, 300))
        core = self.live[which][name] = self.front_ends[which].choose(request)
        self.cores[core].run(prompt)

    def end(self) -> None:
        which = self.dice.randrange(2)
        balancer, own = self.front_ends[which], self.live[which]
        if own:
            name = self.dice.choice(list(own))
            assert balancer.core_of(name) == own.pop(name)
            self.dice.choice([balancer.start, balancer.end])(name)
            balancer.end(name)

    def die(self, core: int) -> None:
        self.cores[core] = Core(num_blocks=12, size=4)
        for each, own in zip(self.front_ends, self.live, strict=True):
            dead = sorted(name for name, place in own.items() if place == core)
            assert sorted(each.remove(core)) == dead
            for name in dead:
                del own[name]
            each.restore(core)
            each.update(core, self.cores[core].whole())

    def report(self, core: int) -> None:
        changed = self.cores[core].news()
        for each in self.front_ends:
            each.update(core, changed)

    def check(self) -> None:
        """End everything: the caches are known, and nothing is left."""
        for index, core in enumerate(self.cores):
            self.report(index)
            for each in self.front_ends:
                known = {number.to_bytes(8, "little") for number in each.cached(index)}
                assert known == {key[:8] for key in core.kv.cache.hashes if key}
        for balancer, own in zip(self.front_ends, self.live, strict=True):
            for name in own:
                balancer.end(name)
            assert balancer.loads == [0, 0, 0] and balancer.num_coming == 0


def test_random_news_and_requests_leave_the_truth(seed: int) -> None:
    all_of = Situation(seed)
    for number in range(600):
        core = all_of.dice.randrange(3)
        match all_of.dice.choice("aaeett" + "c" * (number % 5 == 0) + "d" * (number % 7 == 0)):
            case "a":
                all_of.add(str(number))
            case "e":
                all_of.end()
            case "t":
                all_of.report(core)
            case "c":
                assert all_of.cores[core].kv.reset_prefix_cache()
            case "d":
                all_of.die(core)
    all_of.check()


def test_statistics_of_several_schedulers_are_those_of_one() -> None:
    one = SchedulerStats(1, 2, 0, 0.5, 10, 5, 0, 0, 7, 70, wait_seconds={"seats": 1.0})
    one.counters = {"drafts.num_drafts": 2}
    two = SchedulerStats(3, 0, 1, 0.0, 10, 1, 0, 0, 7, 30, wait_seconds={"seats": 0.5}, blocked="x")
    two.counters = {"drafts.num_drafts": 3}
    one.prefix_missed, two.prefix_missed = {"evicted": 4}, {"evicted": 1, "never seen": 2}
    one.kv_groups = [GroupUse(0, 5), GroupUse(64, 2)]
    two.kv_groups = [GroupUse(0, 1), GroupUse(64, 1)]
    one.num_snapshots, one.snapshot_usage, two.num_snapshots, two.snapshot_usage = 3, 0.5, 2, 0.25
    both = sum_of([one, two])
    assert both is not None
    assert (both.num_running, both.num_waiting, both.num_parked, both.kv_usage) == (4, 2, 1, 0.25)
    assert (both.num_scheduled_tokens, both.prefix_hits) == (100, 6)
    assert both.wait_seconds == {"seats": 1.5} and both.blocked == "x"
    assert both.counters == {"drafts.num_drafts": 5}
    assert both.prefix_missed == {"evicted": 5, "never seen": 2}
    assert both.kv_groups == [GroupUse(0, 6), GroupUse(64, 3)]
    assert (both.num_snapshots, both.snapshot_usage) == (5, 0.375)
    assert sum_of([one, None]) is None


def test_the_blocks_of_a_core_that_died_are_not_in_use() -> None:
    dead, living = DeadCounters(), SchedulerStats(1, 2, 0, 0.5, 10, 5, 0, 0, 7, 70)
    living.kv_groups, living.prefix_missed = [GroupUse(0, 5), GroupUse(64, 2)], {"evicted": 4}
    dead.update(1, living)
    dead.add_dead(1)
    total = dead.add_to(living)
    assert total is not None and total.kv_groups == living.kv_groups
    assert total.prefix_missed == {"evicted": 8}


def test_each_core_has_its_share_of_the_machine() -> None:
    options = {"multiprocess": True, "data_parallel_size": 2, "num_threads": 1}
    config = EngineArgs(memory_utilization=0.6, **options).create_config()  # type: ignore[arg-type]
    share = share_of(config, 2)
    assert share.cache.memory_utilization == pytest.approx(0.3) and share.num_threads == 1
