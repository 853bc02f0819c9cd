"""Which of several cores gets a request."""

from __future__ import annotations

import random

import pytest
from support.simulate import make_request

from engine.config.args import EngineArgs
from engine.messages.stats import GroupUse, SchedulerStats
from engine.rpc.balance import MIN_LEAD_TOKENS, Balancer
from engine.rpc.joined import DeadCounters, sum_of
from engine.rpc.launch import share_of

SYSTEM = list(range(64))  # what several prompts begin with: 4 blocks


def test_strangers_go_where_least_is_to_be_done() -> None:
    balancer = Balancer(3, 16)
    sizes = [100, 10, 10, 10, 50, 5]
    chosen = [balancer.choose(make_request(str(i), [i] * 16, size)) for i, size in enumerate(sizes)]
    assert chosen == [0, 1, 2, 1, 2, 1]


def test_a_prompt_goes_where_its_beginning_went() -> None:
    balancer = Balancer(4, 16)
    for i in range(4):
        balancer.choose(make_request(f"a{i}", [100 + i] * 40, 10))
    home = balancer.choose(make_request("b", [*SYSTEM, 1, 2], 10))
    for i in range(8):
        assert balancer.choose(make_request(f"c{i}", [*SYSTEM, 7, i], 10)) == home
    assert balancer.choose(make_request("d", [102] * 32, 10)) == balancer.core_of("a2")


def test_other_salts_and_adapters_share_nothing() -> None:
    balancer = Balancer(2, 16)
    assert balancer.choose(make_request("a", SYSTEM, 500, cache_salt="x")) == 0
    assert balancer.choose(make_request("b", SYSTEM, 10, cache_salt="y")) == 1
    assert balancer.choose(make_request("c", SYSTEM, 10, cache_salt="x")) == 0


def test_a_favourite_that_has_too_much_to_do_is_passed() -> None:
    balancer = Balancer(2, 16)
    cores = [balancer.choose(make_request(str(i), SYSTEM, 400)) for i in range(20)]
    assert set(cores) == {0, 1}
    assert max(balancer.loads) - min(balancer.loads) <= MIN_LEAD_TOKENS + 2 * (400 + 64)


def test_ends_are_counted_once_and_nothing_is_left(seed: int) -> None:
    dice, balancer, live = random.Random(seed), Balancer(3, 4), {}
    for number in range(2000):
        if live and dice.random() < 0.5:
            name = dice.choice(list(live))
            assert balancer.core_of(name) == live.pop(name)
            for _ in range(dice.randint(1, 2)):
                balancer.end(name)
            assert balancer.core_of(name) is None
        else:
            prompt = [dice.randrange(3) for _ in range(dice.randint(1, 30))]
            live[str(number)] = balancer.choose(make_request(str(number), prompt, 9))
    for name in live:
        balancer.end(name)
    assert balancer.loads == [0, 0, 0]


def test_only_the_newest_prompts_are_remembered() -> None:
    balancer = Balancer(2, 1, max_remembered=8)
    for name in ("old", "new"):  # one at each core
        balancer.choose(make_request(name, [ord(name[0])] * 8, 1))
    assert (balancer.core_of("old"), balancer.core_of("new")) == (0, 1)
    balancer.end("old")
    assert balancer.choose(make_request("new too", [ord("n")] * 8, 1)) == 1
    balancer.end("new")
    balancer.end("new too")
    balancer.choose(make_request("busy", [7], 1))
    assert balancer.choose(make_request("old too", [ord("o")] * 8, 1)) == 1


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
