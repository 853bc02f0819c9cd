"""KV that comes from elsewhere or goes there: loads, loans, and who holds which block meanwhile."""

from __future__ import annotations

import pytest
from support.holders import fill, holder

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.kv.connector import Farewell, RemoteMatch
from engine.kv.manager import KVManager
from engine.kv.tables import Group
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
def test_a_load_within_the_step_leaves_only_the_rest_to_compute():
    kv, source = make(num_tokens=48)
    req = holder(0, list(range(60)))
    assert (kv.lookup(req).num_tokens, kv.lookup(req).num_remote) == (0, 48)
    assert kv.ready(req) == 48 and source.loads == []
    assert kv.missing(req, 60) == 4
    assert kv.reserve(req, 60)
    assert source.loads == [("r0", [1, 2, 3], 48)] and kv.ready(req) == 48
    assert kv.reserve(req, 64) and len(source.loads) == 1
    kv.commit(req, 60)
    assert kv.cached_prefix(holder(1, list(range(60)))) == 48


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
def test_the_last_token_is_computed_even_if_all_could_be_loaded():
    kv, _ = make(num_tokens=1000)
    assert kv.ready(holder(0, list(range(60)))) == 59


@pytest.mark.behaviour(97)
def test_an_asynchronous_load_holds_blocks_until_it_is_done():
    kv, source = make(num_tokens=48, asynchronous=True)
    req = holder(0, list(range(60)))
    assert kv.lookup(req).num_remote == 48 and kv.ready(req) == 0
    assert kv.hold(req, 60) and not kv.is_loading(req)
    kv.start_load(req)
    assert source.loads == [("r0", [1, 2, 3], 48)]
    assert kv.is_loading(req) and kv.ready(req) == 0 and not kv.drain().rows
    twin = holder(1, list(range(60)))
    assert kv.cached_prefix(twin) == 0, "nobody reads what is not there yet"
    kv.loaded(req, 48)
    assert not kv.is_loading(req) and kv.ready(req) == 48
    assert kv.cached_prefix(twin) == 48
    assert kv.reserve(req, 60) and len(kv.drain().rows) == 4


@pytest.mark.behaviour(97)
def test_a_load_of_everything_leaves_the_last_block_unshared():
    kv, _ = make(num_tokens=64, asynchronous=True)
    req = holder(0, list(range(64)))
    assert kv.hold(req, 64)
    kv.start_load(req)
    kv.loaded(req, 64)
    assert kv.ready(req) == 63
    assert [kv.cache.hash_of(block) is None for block in kv.held(req)] == [False] * 3 + [True]


@pytest.mark.behaviour(97)
def test_what_failed_to_load_is_computed():
    kv, _ = make(num_tokens=48, asynchronous=True)
    req = holder(0, list(range(60)))
    assert kv.hold(req, 60)
    kv.start_load(req)
    kv.loaded(req, 16)
    assert kv.ready(req) == 16 and kv.cached_prefix(holder(1, list(range(60)))) == 16


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
def test_blocks_are_free_only_when_they_were_sent():
    kv, source = make(keep=True, params={"where": "here"})
    req = holder(0, list(range(40)))
    blocks = list(fill(kv, req))
    assert kv.finish(req) == {"where": "here"}
    assert source.ended == [("r0", blocks)]
    assert kv.held(req) == [] and kv.num_free == 7 and not kv.reset_prefix_cache()
    assert kv.cached_prefix(holder(1, list(range(40)))) == 32, "they can be shared meanwhile"
    assert kv.sent("r0")
    assert kv.num_free == 10 and kv.lent == {}
    assert not kv.sent("r0") and kv.num_free == 10


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


@pytest.mark.behaviour(99)
def test_the_second_load_waits_until_the_first_is_done():
    kv, source = make(num_tokens=1000, asynchronous=True)
    kv.pool.take(1)  # nine are left
    first, second = holder(0, [1] * 128), holder(1, [2] * 80)
    assert kv.hold(first, 128)
    kv.start_load(first)
    before = (kv.pool.free_order(), list(kv.pool.num_refs))
    assert not kv.fits(second, 80) and not kv.hold(second, 80)
    assert (kv.pool.free_order(), kv.pool.num_refs) == before and kv.held(second) == []
    kv.loaded(first, 127)
    assert kv.reserve(first, 128)
    kv.finish(first)
    assert kv.hold(second, 80) and [load[0] for load in source.loads] == ["r0"]


@pytest.mark.behaviour(100)
def test_an_abort_during_a_load_gives_the_blocks_back_once():
    kv, source = make(num_tokens=48, asynchronous=True)
    req = holder(0, list(range(60)))
    assert kv.hold(req, 60)
    kv.start_load(req)
    with pytest.raises(AssertionError, match="a transfer writes"):
        kv.release(req)
    kv.finish(req)
    assert kv.num_free == 6, "the transfer still writes into them"
    assert source.ended == [("r0", [1, 2, 3, 4])]
    assert kv.sent("r0") and not kv.sent("r0")
    assert kv.num_free == 10 and kv.pool.num_refs == [0] * 11
    assert kv.cached_prefix(req) == 0


@pytest.mark.behaviour(100)
def test_an_abort_before_or_after_a_load_frees_at_once():
    kv, _ = make(num_tokens=48, asynchronous=True)
    for loads in (False, True):
        req = holder(0, list(range(60)))
        assert kv.hold(req, 60)
        if loads:
            kv.start_load(req)
            kv.loaded(req, 48)
        kv.finish(req)
        assert kv.num_free == 10 and not kv.sent("r0")


def test_a_request_that_never_held_anything_says_farewell_too():
    kv, source = make(keep=True)
    assert kv.finish(holder(0, [1])) is None
    assert source.ended == [("r0", [])] and kv.lent == {}


def test_a_preempted_request_loads_again():
    kv, source = make(num_tokens=48)
    req = holder(0, list(range(60)))
    assert kv.reserve(req, 60)
    kv.release(req)
    assert kv.ready(req) == 48 and kv.reserve(req, 60) and len(source.loads) == 2


def test_a_source_needs_one_group_of_full_attention():
    with pytest.raises(ConfigError, match=r"this model has \[0, 16\]"):
        KVManager(10, 16, source=Store(), groups=[Group(), Group(window=16)])
    with pytest.raises(ConfigError, match=r"this model has \[7\]"):
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


@pytest.mark.behaviour(97)
def test_a_load_starts_when_the_steps_are_settled_that_were_in_flight_when_its_blocks_fell_free():
    kv, source = make(num_tokens=48, asynchronous=True)
    gone, other, late = (holder(row, list(range(row, row + 60))) for row in range(3))
    for req in (gone, other):
        assert kv.reserve(req, 60)
    kv.step_planned()  # it writes into the blocks of both
    kv.step_planned()
    kv.release(gone)
    kv.step_planned()  # begun behind it, and none of its business
    assert kv.hold(late, 60)
    kv.start_load(late)
    assert source.loads == [] and kv.is_loading(late), "not begun, and not to be taken from it"
    kv.step_settled()
    assert source.loads == []
    kv.step_settled()
    assert [name for name, _, _ in source.loads] == ["r2"]
    kv.loaded(late, 48)
    assert kv.ready(late) == 48


@pytest.mark.behaviour(97)
def test_a_load_into_blocks_that_no_step_writes_starts_at_once():
    kv, source = make(num_tokens=48, asynchronous=True)
    kv.step_planned()
    req = holder(0, list(range(60)))
    assert kv.hold(req, 60)
    kv.start_load(req)
    assert [name for name, _, _ in source.loads] == ["r0"]


@pytest.mark.behaviour(97)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_start_to_load_is_computed_and_its_source_is_not_called_again(asynchronous):
    kv, source = make(num_tokens=48, asynchronous=asynchronous)

    def refuse(req, blocks, num_tokens):
        raise OSError("connection lost")

    source.start_load = refuse
    req = holder(0, list(range(60)))
    if asynchronous:
        assert kv.hold(req, 60)
        kv.start_load(req)
        assert kv.take_failed_loads() == [req]
    else:
        assert not kv.hold(req, 60) and kv.held(req) == [], "it takes the tokens it counted on"
    assert kv.take_failed_loads() == []
    assert kv.load_error(req) == "OSError: connection lost"
    assert not kv.is_loading(req) and kv.ready(req) == 0
    kv.release(req)
    assert kv.lookup(req).num_remote == 0 and len(source.asked) == 1
    assert kv.reserve(req, 60)
    kv.finish(req)
    assert kv.num_free == 10 and not kv.lent


@pytest.mark.behaviour(100)
def test_an_abort_after_a_load_could_not_start_leaves_nothing_to_wake():
    kv, source = make(num_tokens=48, asynchronous=True)

    def refuse(req, blocks, num_tokens):
        raise OSError("connection lost")

    source.start_load = refuse
    req = holder(0, list(range(60)))
    assert kv.hold(req, 60)
    kv.start_load(req)
    kv.finish(req)
    assert kv.num_free == 10 and kv.take_failed_loads() == []
