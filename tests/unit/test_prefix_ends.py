"""Why a request's prefix hit was not longer."""

from __future__ import annotations

import pytest
from support.holders import fill, holder
from support.simulate import Run, make_request, make_run

from engine.config.kv_groups import Group
from engine.config.sched import SchedulerConfig
from engine.kv.evictions import Evictions, Latest
from engine.kv.manager import KVManager
from engine.messages.params import SamplingParams
from engine.messages.requests import MediaItem
from engine.sched.policies import POLICIES
from engine.sched.scheduler import Scheduler
from policylab.verify.fake import DigestWorker

PROMPT = list(range(20))


def end_of(
    kv: KVManager, tokens: list[int], row: int = 1, **fields
) -> tuple[int, str, float | None]:
    """Cached tokens of a new request, and why there are no more; the request is then forgotten."""
    req = holder(row, tokens, **fields)
    assert kv.reserve(req, len(tokens))
    found = (kv.num_adopted(req) * kv.block_size, *kv.prefix_end(req))
    kv.finish(req)
    return found


def served(kv: KVManager, tokens: list[int], row: int = 0, **fields) -> None:
    """A request that was computed and has ended."""
    req = holder(row, tokens, **fields)
    fill(kv, req)
    kv.finish(req)


def test_tokens_that_differ_were_never_seen():
    kv = KVManager(40, 4)
    assert end_of(kv, PROMPT) == (0, "never seen", None)
    served(kv, PROMPT)
    assert end_of(kv, [*PROMPT[:9], 99, *PROMPT[10:]]) == (8, "never seen", None)
    assert end_of(kv, [99, *PROMPT[1:]]) == (0, "never seen", None)
    assert end_of(kv, [*PROMPT, 1, 2, 3, 4, 5]) == (20, "never seen", None)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 18, 20])
def test_a_prefix_of_which_every_full_block_was_found_has_no_reason(length):
    kv = KVManager(40, 4)
    served(kv, PROMPT)
    assert end_of(kv, PROMPT[:length]) == ((length - 1) // 4 * 4, "", None)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_prompt_that_has_no_full_block_before_its_last_token_has_no_reason(length):
    for caching in (True, False):
        kv = KVManager(40, 4, enable_prefix_caching=caching)
        assert end_of(kv, PROMPT[:length]) == (0, "", None)
        assert end_of(kv, PROMPT[:length], cache_salt="s", reads_cache=False) == (0, "", None)


def test_an_evicted_block_is_dated():
    kv = KVManager(8, 4)
    kv.set_time(10.0)
    served(kv, PROMPT)  # five of seven blocks
    kv.set_time(12.0)
    served(kv, [*range(100, 117)])  # takes the two others, and evicts the three last
    kv.set_time(15.5)
    assert end_of(kv, PROMPT) == (8, "evicted", 3.5)
    kv.set_time(20.0)
    served(kv, [*range(200, 226)])
    kv.set_time(21.0)
    assert end_of(kv, PROMPT) == (0, "evicted", 1.0), "the first missing block is dated"


def test_what_was_computed_again_and_evicted_again_has_the_later_date():
    kv = KVManager(6, 4)
    for time in (1.0, 2.0, 3.0):
        kv.set_time(time)
        served(kv, PROMPT)
        served(kv, [*range(100, 120)])
    kv.set_time(5.0)
    assert end_of(kv, PROMPT) == (0, "evicted", 2.0)


def test_a_reset_evicts_everything():
    kv = KVManager(40, 4)
    served(kv, PROMPT)
    kv.set_time(3.0)
    assert kv.reset_prefix_cache()
    kv.set_time(4.0)
    assert end_of(kv, PROMPT) == (0, "evicted", 1.0)


def test_withdrawn_content_counts_as_evicted():
    kv = KVManager(40, 4)
    req = holder(0, PROMPT)
    fill(kv, req)
    kv.revoke(req, 8, [req])
    assert end_of(kv, PROMPT) == (0, "evicted", 0.0)


def test_a_block_of_which_a_twin_is_left_is_not_evicted():
    kv = KVManager(40, 4)
    first, second = holder(0, PROMPT), holder(1, PROMPT)
    assert kv.reserve(first, 20) and kv.reserve(second, 20)
    kv.commit(first, 20)
    kv.commit(second, 20)
    kv.cache.unpublish(kv.held(first)[0])
    assert end_of(kv, PROMPT, 2) == (16, "", None)


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}, "another cache salt"),
        ({"cache_salt": "a"}, {}, "another cache salt"),
        ({}, {"cache_salt": "b"}, "another cache salt"),
        ({"adapter": "x"}, {"adapter": "y"}, "another adapter"),
        ({"adapter": "x"}, {}, "another adapter"),
        ({}, {"adapter": "y"}, "another adapter"),
        ({"cache_salt": "a", "adapter": "x"}, {"cache_salt": "a"}, "another adapter"),
        ({"cache_salt": "a", "adapter": "x"}, {"cache_salt": "b"}, "another cache salt"),
    ],
)
def test_equal_tokens_with_another_salt_or_adapter(one, other, reason):
    kv = KVManager(40, 4)
    assert end_of(kv, PROMPT, **one) == (0, "never seen", None)
    served(kv, PROMPT, **one)
    assert end_of(kv, PROMPT, **other) == (0, reason, None)
    assert end_of(kv, PROMPT, **one) == (16, "", None)
    served(kv, PROMPT[:8], **other)
    assert end_of(kv, PROMPT, **other) == (8, reason, None), "so much it computed itself"
    assert end_of(kv, [*PROMPT[:9], *range(50, 60)], **other) == (8, "never seen", None)


def test_equal_tokens_with_other_media():
    kv = KVManager(60, 4)
    cat, dog = ([MediaItem(6, 5, name)] for name in ("cat", "dog"))
    served(kv, PROMPT, media=cat)
    assert end_of(kv, PROMPT, media=dog) == (4, "other media", None)
    assert end_of(kv, PROMPT) == (4, "other media", None)
    assert end_of(kv, PROMPT, media=[MediaItem(7, 5, "cat")]) == (4, "other media", None)
    assert end_of(kv, PROMPT, media=cat) == (16, "", None)
    served(kv, PROMPT)
    assert end_of(kv, PROMPT, media=dog) == (4, "other media", None)
    assert end_of(kv, PROMPT, media=dog, cache_salt="s") == (0, "another cache salt", None)


def test_another_salt_whose_blocks_are_gone_would_not_have_helped():
    kv = KVManager(6, 4)
    served(kv, PROMPT, cache_salt="a")
    served(kv, [*range(100, 120)])
    assert end_of(kv, PROMPT, cache_salt="b") == (0, "never seen", None)
    assert end_of(kv, PROMPT, cache_salt="a")[1] == "evicted"


def test_own_blocks_that_were_evicted_come_before_those_of_another_salt():
    kv = KVManager(11, 4)
    served(kv, PROMPT, cache_salt="b")
    kv.set_time(1.0)
    served(kv, [*range(100, 123)])
    served(kv, PROMPT, cache_salt="a")
    kv.set_time(2.0)
    assert end_of(kv, PROMPT, cache_salt="b") == (0, "evicted", 1.0)


def test_the_other_salt_is_named_even_if_the_request_evicts_its_blocks():
    kv = KVManager(6, 4)
    served(kv, PROMPT, cache_salt="a")
    assert end_of(kv, PROMPT, cache_salt="b") == (0, "another cache salt", None)


def test_a_request_that_may_not_read_the_cache():
    kv = KVManager(40, 4)
    served(kv, PROMPT)
    assert end_of(kv, PROMPT, reads_cache=False) == (0, "every token wanted", None)
    without = KVManager(40, 4, enable_prefix_caching=False)
    served(without, PROMPT)
    assert end_of(without, PROMPT) == (0, "prefix caching off", None)
    assert end_of(without, PROMPT, reads_cache=False) == (0, "prefix caching off", None)


@pytest.mark.parametrize("groups", [(0, 8), (0, 0, 8), (0, 8, 8)])
def test_a_window_that_is_gone(groups):
    kv = KVManager(80, 4, groups=[Group(window=window) for window in groups])
    kv.set_time(1.0)
    req = holder(0, PROMPT)
    fill(kv, req)
    assert kv.reserve(req, 24)  # the blocks before the window become free
    windowed = groups.index(8)
    for table_entry in range(2):
        key = kv.cache.find(chain_key(kv, req, table_entry, windowed))
        kv.cache.unpublish(key)
    kv.set_time(4.0)
    assert end_of(kv, PROMPT[:11]) == (0, "window gone", 3.0)
    assert end_of(kv, PROMPT) == (16, "", None), "there the window is whole"
    assert end_of(kv, [*range(50, 70)]) == (0, "never seen", None)


def chain_key(kv, req, index, group):
    """The hash of an entry that is out of the window now."""
    return kv.cache.hashes[kv.held(req, 0)[index]] + bytes([group])


def test_blocks_that_are_gone_in_full_attention_are_evicted():
    kv = KVManager(80, 4, groups=[Group(), Group(window=8)])
    req = holder(0, PROMPT)
    fill(kv, req)
    kv.cache.unpublish(kv.held(req, 0)[1])
    kv.set_time(2.0)
    assert end_of(kv, PROMPT) == (4, "evicted", 2.0)


def test_in_a_model_that_has_only_windows_the_missing_block_is_evicted():
    kv = KVManager(40, 4, groups=[Group(window=8)])
    req = holder(0, PROMPT)
    blocks = list(fill(kv, req))
    kv.cache.unpublish(blocks[1])
    assert end_of(kv, PROMPT) == (16, "", None)
    assert end_of(kv, PROMPT[:12]) == (4, "evicted", 0.0)


def test_the_latest_evictions_are_kept_and_the_memory_is_bounded():
    latest = Latest[int](10)
    for number in range(1000):
        latest.put(b"%d" % number, number)
        assert latest.get(b"%d" % max(0, number - 9), None) == max(0, number - 9)
        assert len(latest) <= 20
    assert latest.get(b"5", None) is None


def test_only_the_latest_evictions_are_remembered():
    evictions, keys = Evictions(10), [b"%d" % number for number in range(9000)]
    for number in range(5000):
        evictions.now = float(number)
        evictions.add_each(keys[number : number + 1])
        if number % 700 == 0:
            assert evictions.age(keys[number]) == 0.0
    assert evictions.age(keys[4000]) == 999.0 and evictions.age(keys[1000]) is None
    evictions.now = 6000.0
    evictions.add_each(keys)
    evictions.now = 6001.0
    assert evictions.age(keys[-1]) == 1.0 and evictions.age(keys[0]) is None


# -- with a scheduler


def test_metrics_of_a_request_have_the_reason_and_the_seconds():
    clock = Clock()
    run = make_run(num_blocks=12, block_size=4, clock=clock)
    for name, prompt, fields in (
        ("a", PROMPT, {}),
        ("b", PROMPT, {}),
        ("c", PROMPT, {"cache_salt": "s"}),
        ("d", [*range(100, 140)], {}),
        ("e", PROMPT, {}),
        ("f", PROMPT, {"params": SamplingParams(max_tokens=1, prompt_logprobs=1)}),
        ("g", [1], {}),
    ):
        run.add(make_request(name, prompt, 1, **fields))
        run.drain()
        clock.now += 2.0
    found = {
        name: (s.num_cached_tokens, s.prefix_end, s.prefix_evicted)
        for name, [s] in run.starts.items()
    }
    assert found == {
        "a": (0, "never seen", None),
        "b": (16, "", None),
        "c": (0, "another cache salt", None),
        "d": (0, "never seen", None),
        "e": (0, "evicted", 2.0),
        "f": (0, "every token wanted", None),
        "g": (0, "", None),
    }
    missed = run.scheduler.make_stats().prefix_missed
    assert missed == {
        "never seen": 16 + 36,
        "another cache salt": 16,
        "evicted": 16,
        "every token wanted": 16,
    }


def test_a_preempted_request_keeps_the_reason_of_its_first_start():
    run = make_run(num_blocks=12, block_size=4, max_num_seqs=2)
    run.add(make_request("a", [*range(20)], 22))
    run.add(make_request("b", [*range(50, 70)], 20))
    run.drain()
    assert run.scheduler.make_stats().num_preemptions > 0
    assert len(run.starts["b"]) > 1
    assert {s.prefix_end for starts in run.starts.values() for s in starts} == {"never seen"}


def test_without_prefix_caching():
    run = make_run(num_blocks=40, block_size=4, caching=False)
    run.add(make_request("a", PROMPT, 1))
    run.drain()
    [started] = run.starts["a"]
    assert (started.prefix_end, started.prefix_evicted) == ("prefix caching off", None)
    assert run.scheduler.make_stats().prefix_missed == {}


def test_a_window_that_is_gone_in_a_whole_run():
    clock = Clock()
    kv = KVManager(30, 4, groups=[Group(), Group(window=8, max_blocks=5)])
    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=64)
    scheduler = Scheduler(config, kv, POLICIES["fcfs"](), clock=clock)
    run = Run(scheduler, DigestWorker(30, 4, windows=(0, 8)))
    run.add(make_request("a", [*range(40)], 8))
    run.drain()
    run.add(make_request("b", [*range(100, 130)], 1))  # takes the blocks that left the window first
    run.drain()
    clock.now = 9.0
    run.add(make_request("c", [*range(24), 1, 2], 1))
    run.drain()
    [started] = run.starts["c"]
    assert started.prefix_end == "window gone" and started.prefix_evicted == 9.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now
