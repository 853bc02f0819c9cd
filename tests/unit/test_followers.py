"""What a core sends to clients that follow its prefix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_router import Router
from support.holders import fill, holder
from support.simulate import make_request

from engine.kv.manager import KVManager
from engine.messages.requests import CoreOutputs, Finished, Started
from engine.messages.wire import Answer, CacheNews
from engine.rpc.followers import NEWS_SECONDS, RETRY_SECONDS, Followers
from engine.rpc.sessions import ClientSessions

LATER = NEWS_SECONDS


class Told:
    """A core's cache with its followers, at times that the test names."""

    def __init__(self) -> None:
        self.kv = KVManager(11, 16)
        self.digests = {"sql": "1"}
        self.router = Router()
        self.sessions = ClientSessions(self.router, lambda ids: None)
        self.core: Any = SimpleNamespace(
            follow_cache=self.kv.follow_cache, adapter_digests=lambda: dict(self.digests)
        )
        self.followers = Followers(self.core, self.sessions)

    def follow(self, name: bytes) -> Any:
        session = self.sessions.welcome(name, "")
        self.followers.add(session)
        return session

    def run(self, first: int, num_blocks: int) -> list[bytes]:
        """Cache blocks; their ids."""
        req = holder(0, list(range(first, first + 16 * num_blocks)))
        fill(self.kv, req)
        hashes = [self.kv.cache.hash_of(block) for block in self.kv.held(req)]
        self.kv.finish(req)
        return [each[:8] for each in hashes if each]

    def news(self, at: float, name: bytes = b"a", **options: Any) -> list[CacheNews]:
        before = len(self.router.sent)
        self.followers.tell(at, **options)
        sent = [message for who, message in self.router.sent[before:] if who == name]
        return [message for message in sent if isinstance(message, CacheNews)]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_follower_gets_the_whole_cache_and_then_changes(told: Told) -> None:
    before = told.run(0, 2)
    told.follow(b"a")
    (whole,) = told.news(0.0)
    assert (whole.sequence, whole.is_whole, whole.stored) == (0, True, b"".join(before))
    assert told.news(1.0) == []
    more = told.run(500, 1)
    assert told.news(2.0) == [CacheNews(1, False, more[0], b"", 0)]
    told.kv.pool.take(8 + 2)  # the free ones, then those that were used first
    (changed,) = told.news(3.0)
    assert changed.removed == before[1] + before[0] + more[0]
    told.run(900, 0)
    assert told.news(4.0) == []


def test_changes_are_collected_unless_a_request_ends(told: Told) -> None:
    told.follow(b"a")
    told.news(0.0)
    told.run(0, 1)
    assert len(told.news(1.0)) == 1
    told.run(100, 1)
    assert told.news(1.0 + LATER / 2) == []
    assert [each.sequence for each in told.news(1.0 + LATER / 2, at_once=True)] == [2]


def test_a_block_that_left_and_came_back_is_stored(told: Told) -> None:
    told.follow(b"a")
    told.news(0.0)
    (name,) = told.run(0, 1)
    told.news(1.0)
    taken = told.kv.pool.take(10)
    told.kv.pool.release(taken)
    told.run(0, 1)
    assert told.news(2.0) == [CacheNews(2, False, name, b"", 0)]


def test_an_emptied_cache_is_a_whole_one(told: Told) -> None:
    told.follow(b"a")
    told.run(0, 2)
    told.news(0.0)
    assert told.kv.reset_prefix_cache()
    (name,) = told.run(300, 1)
    (news,) = told.news(1.0)
    assert news.is_whole and news.stored == name and not news.removed and news.sequence == 0


def test_who_does_not_read_gets_the_whole_cache_later(told: Told) -> None:
    told.follow(b"a")
    told.news(0.0)
    told.router.full.add(b"a")
    told.run(0, 1)
    assert told.news(1.0) == [] and told.followers.next_look() < 1.0
    told.run(100, 1)
    told.followers.tell(2.0)
    assert told.followers.next_look() == 2.0 + RETRY_SECONDS and not told.sessions.has_backlog()
    told.router.full.clear()
    told.run(200, 1)
    assert told.news(2.1) == []
    (whole,) = told.news(2.0 + RETRY_SECONDS)
    assert whole.is_whole and len(whole.stored) == 3 * 8
    told.router.full.add(b"a")
    told.sessions.send(b"a", Answer(1, "waits"))
    told.run(400, 1)
    assert told.news(4.0) == []  # nothing overtakes


def test_each_hears_the_work_of_the_others(told: Told) -> None:
    one, other = told.follow(b"a"), told.follow(b"b")
    told.news(0.0)
    one.work.add(make_request("x", [1] * 50, 10))
    one.work.add(make_request("y", [1] * 5, 1))
    assert told.news(1.0) == []
    one.work.add(make_request("z", [1], 1))
    (news,) = told.news(2.0, b"b")
    assert news.load == 50 + 10 + 6 + 2 and not news.stored
    started, ended = [Started(0, 0, 0.0)], [Finished(0, "stop")]
    told.sessions.publish(one.index, CoreOutputs(["x"], [1], None, 0.0, started=started))
    assert told.news(3.0, b"b")[0].load == 10 + 6 + 2
    told.sessions.publish(one.index, CoreOutputs(["y"], [1], None, 0.0, finished=ended))
    assert told.news(4.0, b"b")[0].load == 10 + 2
    told.sessions.leave(one)
    assert told.news(5.0, b"b")[0].load == 0
    assert other.work.load == 0


def test_adapters_are_reported_when_they_change(told: Told) -> None:
    told.follow(b"a")
    assert [each.adapters for each in told.news(0.0)] == [{"sql": "1"}]
    assert told.news(5.0) == []
    told.digests["sql"] = "2"
    assert told.news(5.1) == []  # looked at once a second
    assert told.news(6.2) == [CacheNews(1, False, b"", b"", 0, adapters={"sql": "2"})]
    told.follow(b"b")
    assert [each.adapters for each in told.news(7.0, b"b")] == [{"sql": "2"}]


def test_when_all_have_left_nothing_is_collected(told: Told) -> None:
    told.sessions.leave(told.follow(b"a"))
    told.followers.tell(0.0)
    assert told.kv.cache.follower is None
    told.follow(b"a")
    told.run(0, 1)
    assert len(told.news(1.0)[0].stored) == 8


def test_a_core_without_a_cache_says_so() -> None:
    told = Told()
    told.core.follow_cache = lambda: None
    told.follow(b"a")
    (whole,) = told.news(0.0)
    assert not whole.has_cache and whole.stored == b""
    assert told.news(1.0) == []
