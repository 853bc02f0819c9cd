"""Cache events: what a router is told, in which order, and how it catches up."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from support.core_clients import own_place
from support.holders import fill, holder
from support.kv_subscriber import KVEventSubscriber
from support.simulate import make_request

from engine.config.cache import CacheConfig
from engine.config.engine import EngineConfig
from engine.config.kv_groups import FULL, Group
from engine.config.model import ModelConfig
from engine.config.sched import SchedulerConfig
from engine.core.build import wire
from engine.core.kv_publisher import KVEventPublisher, events_endpoint, replay_endpoint
from engine.errors import ConfigError
from engine.kv.events import EventLog
from engine.kv.manager import KVManager
from engine.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from engine.messages.requests import MediaItem
from engine.observe.guard import Failures, ObserverGuard
from policylab.verify.fake import DigestWorker


class Listener:
    """Keeps batches."""

    def __init__(self) -> None:
        self.batches: list[KVEventBatch] = []
        self.closed = False

    def publish(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)

    def close(self) -> None:
        self.closed = True


def listened(num_blocks=11, **options):
    listener = Listener()
    groups = options.get("groups", (FULL,))
    events = EventLog(
        listener,
        block_size=16,
        clock=lambda: 2.5,
        groups=groups,
        name_of={"digest": "lora"}.__getitem__,
        rank=3,
    )
    return KVManager(num_blocks, 16, events=events, **options), listener


def numbers(kv, req):
    """The hashes of the request's full blocks, as routers read them."""
    hashes = [kv.cache.hash_of(block) for block in kv.held(req)]
    return [int.from_bytes(each[-8:], "big") for each in hashes if each is not None]


def last_events(kv, listener):
    kv.drain()
    return listener.batches[-1].events


@pytest.mark.behaviour(67)
def test_storing_is_one_event_with_parent_tokens_and_adapter():
    kv, listener = listened()
    req = holder(0, list(range(55)), adapter="digest", cache_salt="salt")
    fill(kv, req)
    hashes = numbers(kv, req)
    keys = [["lora", "salt"], ["lora"], ["lora"]]
    (event,) = last_events(kv, listener)
    assert event == BlockStored(
        hashes, None, list(range(48)), 16, lora_name="lora", extra_keys=keys
    )
    assert listener.batches[-1].data_parallel_rank == 3
    req.tokens.extend(range(55, 80))
    assert kv.reserve(req, 80)
    kv.commit(req, 80)
    (stored,) = last_events(kv, listener)
    assert stored.parent_block_hash == hashes[2] and stored.extra_keys == keys[1:]
    assert stored.token_ids == list(range(48, 80))
    assert len(stored.block_hashes) == 2


@pytest.mark.behaviour(67)
def test_each_eviction_is_an_event_and_a_reset_clears_all():
    kv, listener = listened()
    first = holder(0, [1] * 64)
    fill(kv, first)
    kv.finish(first)
    (stored,) = last_events(kv, listener)
    other = holder(1, [2] * 128)
    assert kv.reserve(other, 128)  # six blocks are empty, the last two of four must go
    assert last_events(kv, listener) == [BlockRemoved(stored.block_hashes[:1:-1])]
    kv.finish(other)
    assert kv.reset_prefix_cache()
    assert last_events(kv, listener) == [AllBlocksCleared()]
    assert [batch.ts for batch in listener.batches] == [2.5, 2.5, 2.5]


def test_media_are_among_the_extra_keys():
    kv, listener = listened()
    media = [MediaItem(3, 4, "a"), MediaItem(20, 20, "b"), MediaItem(50, 2, "late")]
    fill(kv, holder(0, list(range(55)), media=media))
    (event,) = last_events(kv, listener)
    assert event.extra_keys == [[("a", 3)], [("b", 4)], None]


@pytest.mark.behaviour(67)
def test_a_step_without_events_is_no_batch():
    kv, listener = listened()
    assert kv.reserve(holder(0, [1] * 64), 64)
    kv.drain()
    kv.drain()
    assert listener.batches == []


@pytest.mark.behaviour(67)
def test_content_is_removed_when_its_last_twin_is():
    kv, listener = listened(num_blocks=3)
    one, other = holder(0, [1] * 16), holder(1, [1] * 16, reads_cache=False)
    for req in (one, other):
        fill(kv, req)
        kv.finish(req)
    kv.drain()
    kv.pool.take(1)
    assert len(listener.batches) == 1
    kv.pool.take(1)
    assert [type(event) for event in last_events(kv, listener)] == [BlockRemoved]


@pytest.mark.behaviour(67)
def test_each_group_of_layers_says_so():
    kv, listener = listened(num_blocks=20, groups=[Group(), Group(window=16)])
    req = holder(0, [1] * 32)
    fill(kv, req)
    first, second = last_events(kv, listener)
    assert (first.group_idx, first.kv_cache_spec_kind) == (0, "full_attention")
    assert first.kv_cache_spec_sliding_window is None
    assert (second.group_idx, second.kv_cache_spec_kind) == (1, "sliding_window")
    assert second.kv_cache_spec_sliding_window == 16
    assert first.block_hashes == second.block_hashes
    kv.finish(req)
    kv.pool.take(19)
    removed = last_events(kv, listener)
    lost = sorted((event.group_idx, each) for event in removed for each in event.block_hashes)
    assert lost == sorted((group, each) for group in (0, 1) for each in first.block_hashes)


def test_a_set_of_hashes_kept_by_the_events_is_the_cache(seed):
    rng = random.Random(seed)
    kv, listener = listened(num_blocks=12)
    known: set[int] = set()
    for step in range(300):
        req = holder(0, [rng.randrange(2) for _ in range(rng.choice([16, 32, 64]))])
        req.reads_cache = rng.random() < 0.7
        fill(kv, req)
        kv.finish(req)
        kv.drain()
        if step % 50 == 49:
            assert kv.reset_prefix_cache()
            kv.drain()
        for batch in listener.batches:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    known |= set(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    assert known >= set(event.block_hashes)
                    known -= set(event.block_hashes)
                else:
                    known.clear()
        listener.batches.clear()
        assert known == {int.from_bytes(each[-8:], "big") for each in kv.cache.hashes if each}


# -- over sockets


def batch(sequence: int) -> KVEventBatch:
    return KVEventBatch(float(sequence), [BlockRemoved([sequence]), AllBlocksCleared()])


@pytest.fixture
def publisher():
    publisher = KVEventPublisher(None, num_remembered=600)
    yield publisher
    publisher.close()


@pytest.fixture
def subscriber(publisher):
    subscriber = KVEventSubscriber(publisher.endpoint)
    yield subscriber
    subscriber.close()


def settled(publisher, subscriber, sequence):
    """Publish from here on until the subscription has arrived; the batches read."""
    for number in range(sequence, sequence + 200):
        publisher.publish(batch(number))
        if batches := subscriber.read(0.05):
            return batches
    raise AssertionError("the subscription never arrived")


def test_batches_arrive_as_they_were_sent(publisher, subscriber):
    batches = settled(publisher, subscriber, 0)
    assert batches == [batch(number) for number in range(len(batches))]
    publisher.publish(batch(len(batches)))
    assert subscriber.read(5) == [batch(len(batches))]
    assert subscriber.num_lost == 0


def test_a_late_listener_asks_for_what_it_missed(publisher, subscriber):
    for number in range(550):
        publisher.publish(batch(number))
    assert subscriber.catch_up(5) == [batch(number) for number in range(550)]
    assert subscriber.catch_up(5) == [] and subscriber.num_lost == 0


def test_a_gap_is_seen_and_filled(publisher, subscriber):
    """Events that were sent before the subscriber connected can be requested, too."""
    for number in range(3):
        publisher.publish(batch(number))
    late = KVEventSubscriber(publisher.endpoint)
    read = settled(publisher, late, 3)
    late.close()
    assert len(read) >= 4 and read == [batch(number) for number in range(len(read))]
    assert late.num_lost == 0


def test_what_is_lost_for_good_is_counted(publisher, subscriber):
    for number in range(1000):
        publisher.publish(batch(number))
    assert [one.ts for one in subscriber.catch_up(5)] == list(range(400, 1000))
    assert subscriber.num_lost == 400


def test_nonsense_is_not_answered_and_does_no_harm(publisher, subscriber):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(replay_endpoint(publisher.endpoint))
        for frames in ([b""], [b"GET / HTTP/1.1"], [b"12345678", b"more"], [b"", b"123"]):
            stranger.send_multipart(frames)
        publisher.publish(batch(0))
        assert subscriber.catch_up(5) == [batch(0)]
        assert not stranger.poll(50)


def test_a_publisher_that_is_gone_is_a_timeout(publisher, subscriber):
    publisher.close()
    publisher.close()
    with pytest.raises(TimeoutError, match="no answer about past cache events"):
        subscriber.catch_up(0.05)


def test_an_address_in_use_is_refused_by_name(publisher):
    with pytest.raises(ConfigError, match=f"cannot listen at {publisher.endpoint}.*choose another"):
        KVEventPublisher(publisher.endpoint)


def test_a_port_in_use_is_refused_by_name():
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=f"cannot listen at tcp://127.0.0.1:{port}: "):
            KVEventPublisher(f"tcp://127.0.0.1:{port}")


def test_a_file_that_a_dead_process_left_behind_is_taken_over(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "events"))
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events")
    subscriber = KVEventSubscriber(publisher.endpoint)
    publisher.publish(batch(0))
    assert subscriber.catch_up(5) == [batch(0)]
    subscriber.close()
    publisher.close()


def test_what_a_killed_publisher_left_goes_with_the_next(tmp_path, monkeypatch):
    with own_place(monkeypatch) as place:
        code = (
            "import os, signal, tempfile\n"
            f"tempfile.tempdir = {str(place)!r}\n"
            "from engine.core.kv_publisher import KVEventPublisher\n"
            "publisher = KVEventPublisher(None)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=False)
        (left,) = place.iterdir()
        publisher = KVEventPublisher(None)
        assert not left.exists()
        publisher.close()
        KVEventPublisher(f"ipc://{tmp_path}/events").close()  # needs no directory of its own


def test_the_past_of_a_port_is_told_on_the_next():
    assert replay_endpoint("tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5558"


def test_each_of_several_cores_has_its_own_addresses():
    of_tcp = [events_endpoint("tcp://*:5557", rank) for rank in range(3)]
    assert of_tcp == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert [replay_endpoint(each, 3) for each in of_tcp] == [
        "tcp://*:5560",
        "tcp://*:5561",
        "tcp://*:5562",
    ]
    assert events_endpoint("ipc:///x", 0) == "ipc:///x"
    assert replay_endpoint(events_endpoint("ipc:///x", 2), 3) == "ipc:///x-2-replay"


def test_the_bytes_are_those_that_routers_read(tmp_path):
    """Request past batches in the form that decoders of vLLM's events use."""
    publisher = KVEventPublisher(f"ipc://{tmp_path}/e", topic="kv@pod@m", rank=1, num_ranks=2)
    subscriber = KVEventSubscriber(publisher.endpoint, "kv@", publisher.replay_endpoint)
    stored = BlockStored([1 << 63], 7, [5, 6], 2, lora_name="sql", extra_keys=[["sql"]])
    events = [stored, BlockRemoved([8, 9], group_idx=1), AllBlocksCleared()]
    publisher.publish(KVEventBatch(0.5, events, 1))
    assert publisher.endpoint.endswith("/e-1")
    with zmq.Context() as context, context.socket(zmq.REQ) as request:
        request.setsockopt(zmq.LINGER, 0)
        request.connect(publisher.replay_endpoint)
        request.send((0).to_bytes(8, "big"))
        assert request.poll(5000)
        topic, sequence, payload = request.recv_multipart()
    assert (topic, sequence) == (b"kv@pod@m", bytes(8))
    first = {
        "type": "BlockStored",
        "block_hashes": [1 << 63],
        "parent_block_hash": 7,
        "token_ids": [5, 6],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "sql",
        "extra_keys": [["sql"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }
    second = {"type": "BlockRemoved", "block_hashes": [8, 9], "medium": "GPU", "group_idx": 1}
    assert msgspec.msgpack.decode(payload) == [
        0.5,
        [first, second, {"type": "AllBlocksCleared"}],
        1,
    ]
    assert subscriber.catch_up(5) == [KVEventBatch(0.5, events, 1)]
    subscriber.close()
    publisher.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_events_endpoint": "udp://x"}, "kv_events_endpoint is 'udp://x', must be ipc://"),
        ({"kv_events_endpoint": "tcp://h:65535"}, "port in 1..65534"),
        ({"kv_events_endpoint": "tcp://h:" + "9" * 5000}, "port in 1..65534"),
        ({"kv_events_buffer_steps": 0}, "kv_events_buffer_steps is 0, must be in 1"),
        (
            {"enable_kv_events": True, "enable_prefix_caching": False},
            "enable_prefix_caching is False",
        ),
        ({"prefix_caching_hash_algo": "md5"}, "is 'md5', must be one of: sha256, fast"),
    ],
)
def test_wrong_cache_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        CacheConfig(**options)


def test_an_engine_publishes_what_its_requests_leave_behind(tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    cache = CacheConfig(
        prefix_caching_hash_algo="fast", enable_kv_events=True, kv_events_endpoint=endpoint
    )
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)), cache=cache)
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
    decided = SimpleNamespace(
        num_kv_blocks=10,
        block_size=16,
        scheduler=scheduler,
        kv_groups=(FULL,),
        snapshot_blocks=0,
    )
    core = wire(config, decided, DigestWorker(10, 16), clock=lambda: 1.5)
    subscriber = KVEventSubscriber(endpoint)
    core.scheduler.add_request(make_request("a", list(range(33)), 2))
    while core.has_work:
        core.step()
    (seen,) = subscriber.catch_up(5)
    assert abs(seen.ts - time.time()) < 600 and seen.events[0].token_ids == list(range(32))
    assert len(seen.events[0].block_hashes) == 2
    subscriber.close()
    core.scheduler.shutdown()
    assert not (tmp_path / "events").exists()


def test_cache_events_that_cannot_be_sent_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures()
    publisher = KVEventPublisher(
        None, guard=ObserverGuard(failures, "kv_events", "they are dropped")
    )
    try:
        for _ in range(3):
            publisher.publish(KVEventBatch(0.0, [object()]))  # type: ignore[list-item]
        publisher.publish(KVEventBatch(3.0, []))
    finally:
        publisher.close()
    publisher.publish(KVEventBatch(4.0, []))
    assert failures.counters() == {"observer_failures.kv_events": 4}
    assert len(caplog.messages) == 1
