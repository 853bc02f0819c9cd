"""KV that comes from elsewhere or goes there: loads, loans, and who holds which block meanwhile."""

from __future__ import annotations

import pytest
from support.holders import fill, holder

from engine.config.kv_groups import Group
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.kv.connector import Farewell, RemoteMatch
from engine.kv.manager import KVManager
from engine.sched.policies.fcfs import FCFS
from engine.sched.scheduler import Scheduler


class Store:
    """A KV source that has ``num_tokens`` of every prompt and keeps what it is told to."""

    def __init__(self, num_tokens=0, *, asynchronous=False, keep=False, params=None):
        self.num_tokens = num_tokens
        self.asynchronous = asynchronous
        self.farewell = Farewell(keep, params)
        self.asked: list[int] = []
        self.loads: list[tuple[str, list[int], int]] = []
        self.ended: list[tuple[str, list[int]]] = []
        self.is_open = True

    def match(self, req, num_local_tokens):
        self.asked.append(num_local_tokens)
        return RemoteMatch(max(0, self.num_tokens - num_local_tokens), self.asynchronous)

    def start_load(self, req, blocks, num_tokens):
        self.loads.append((req.request_id, list(blocks), num_tokens))

    def metadata(self):
        return None

    def finished(self, req, blocks):
        self.ended.append((req.request_id, list(blocks)))
        return self.farewell

    def shutdown(self):
        self.is_open = False


def make(num_blocks=11, **store):
    source = Store(**store)
    return KVManager(num_blocks, 16, source=source), source


@pytest.mark.behaviour(97)
def test_what_is_cached_here_is_not_loaded():
    kv, source = make(num_tokens=48)
    fill(kv, holder(0, list(range(17))))
    source.loads.clear()
    req = holder(1, list(range(60)))
    assert kv.ready(req) == 48 and kv.cached_prefix(req) == 16
    assert kv.reserve(req, 50)
    assert source.loads == [("r1", kv.held(req)[1:3], 32)] and kv.num_adopted(req) == 1


@pytest.mark.behaviour(97)
def test_no_more_is_loaded_than_blocks_are_held_for():
    kv, source = make(num_tokens=48)
    req = holder(0, list(range(60)))
    assert kv.hold(req, 20)
    assert source.loads == [("r0", [1, 2], 20)] and kv.ready(req) == 20


@pytest.mark.behaviour(97)
def test_a_load_of_everything_leaves_the_last_block_unshared():
    kv, _ = make(num_tokens=64, asynchronous=True)
    req = holder(0, list(range(64)))
    assert kv.hold(req, 64)
    kv.start_load(req)
    kv.loaded(req, 64)
    assert kv.ready(req) == 63
    assert [kv.cache.hash_of(block) is None for block in kv.held(req)] == [False] * 3 + [True]


def test_a_source_is_asked_again_only_when_the_local_hit_moves():
    kv, source = make(num_tokens=40)
    reader = holder(0, list(range(60)))
    writer = holder(1, list(range(64)))
    for _ in range(3):
        kv.ready(reader)
    fill(kv, holder(2, [7] * 32))
    kv.ready(reader)
    assert source.asked.count(0) == 2  # once for each of the two requests
    assert kv.reserve(writer, 64)
    kv.commit(writer, 16)
    assert kv.ready(reader) == 40 and source.asked[-1] == 16


def test_prompt_logprobs_need_every_token_computed():
    kv, source = make(num_tokens=48)
    req = holder(0, list(range(60)), reads_cache=False)
    assert kv.ready(req) == 0 and kv.reserve(req, 60) and source.asked == source.loads == []


@pytest.mark.behaviour(98)
def test_an_id_used_again_waits_for_both_transfers():
    kv, _ = make(keep=True)
    for start in (0, 100):
        req = holder(0, list(range(start, start + 40)))
        fill(kv, req)
        kv.finish(req)
    assert kv.num_free == 4
    assert kv.sent("r0") and kv.num_free == 4, "nobody knows which of them has ended"
    assert kv.sent("r0") and kv.num_free == 10


def test_a_request_that_never_held_anything_says_farewell_too():
    kv, source = make(keep=True)
    assert kv.finish(holder(0, [1])) is None
    assert source.ended == [("r0", [])] and kv.lent == {}


def test_a_source_needs_one_group_of_full_attention():
    with pytest.raises(ConfigError, match=r"windows \[0, 16\]"):
        KVManager(10, 16, source=Store(), groups=[Group(), Group(window=16)])
    with pytest.raises(ConfigError, match=r"the model has windows \[7\]"):
        KVManager(10, 16, source=Store(), groups=[Group(window=7)])


def test_shutdown_closes_the_source():
    kv, source = make()
    kv.shutdown()
    assert not source.is_open


def test_the_scheduler_tells_where_kv_comes_from():
    kv, source = make()
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, max_model_len=64)
    assert Scheduler(config, kv, FCFS(), clock=float).get_kv_connector() is source
    alone = KVManager(10, 16)
    assert Scheduler(config, alone, FCFS(), clock=float).get_kv_connector() is None
