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


class FollowedCore:
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
        self.followers.report(at, **options)
        sent = [message for who, message in self.router.sent[before:] if who == name]
        return [message for message in sent if isinstance(message, CacheNews)]


@pytest.fixture
def followed() -> FollowedCore:
    return FollowedCore()


def test_a_follower_gets_the_whole_cache_and_then_changes(followed: FollowedCore) -> None:
    before = followed.run(0, 2)
    followed.follow(b"a")
    (whole,) = followed.news(0.0)
    assert (whole.sequence, whole.is_whole, whole.stored) == (0, True, b"".join(before))
    assert followed.news(1.0) == []
    more = followed.run(500, 1)
    assert followed.news(2.0) == [CacheNews(1, False, more[0], b"", 0)]
    followed.kv.pool.take(8 + 2)  # the free ones, then those that were used first
    (changed,) = followed.news(3.0)
    assert changed.removed == before[1] + before[0] + more[0]
    followed.run(900, 0)
    assert followed.news(4.0) == []


def test_changes_are_collected_unless_a_request_ends(followed: FollowedCore) -> None:
    followed.follow(b"a")
    followed.news(0.0)
    followed.run(0, 1)
    assert len(followed.news(1.0)) == 1
    followed.run(100, 1)
    assert followed.news(1.0 + LATER / 2) == []
    assert [each.sequence for each in followed.news(1.0 + LATER / 2, at_once=True)] == [2]


def test_a_block_that_left_and_came_back_is_stored(followed: FollowedCore) -> None:
    followed.follow(b"a")
    followed.news(0.0)
    (name,) = followed.run(0, 1)
    followed.news(1.0)
    taken = followed.kv.pool.take(10)
    followed.kv.pool.release(taken)
    followed.run(0, 1)
    assert followed.news(2.0) == [CacheNews(2, False, name, b"", 0)]


def test_an_emptied_cache_is_a_whole_one(followed: FollowedCore) -> None:
    followed.follow(b"a")
    followed.run(0, 2)
    followed.news(0.0)
    assert followed.kv.reset_prefix_cache()
    (name,) = followed.run(300, 1)
    (news,) = followed.news(1.0)
    assert news.is_whole and news.stored == name and not news.removed and news.sequence == 0


def test_who_does_not_read_gets_the_whole_cache_later(followed: FollowedCore) -> None:
    followed.follow(b"a")
    followed.news(0.0)
    followed.router.full.add(b"a")
    followed.run(0, 1)
    assert followed.news(1.0) == [] and followed.followers.next_look() < 1.0
    followed.run(100, 1)
    followed.followers.report(2.0)
    assert (
        followed.followers.next_look() == 2.0 + RETRY_SECONDS
        and not followed.sessions.has_backlog()
    )
    followed.router.full.clear()
    followed.run(200, 1)
    assert followed.news(2.1) == []
    (whole,) = followed.news(2.0 + RETRY_SECONDS)
    assert whole.is_whole and len(whole.stored) == 3 * 8
    followed.router.full.add(b"a")
    followed.sessions.send(b"a", Answer(1, "waits"))
    followed.run(400, 1)
    assert followed.news(4.0) == []  # nothing overtakes


def test_each_hears_the_work_of_the_others(followed: FollowedCore) -> None:
    one, other = followed.follow(b"a"), followed.follow(b"b")
    followed.news(0.0)
    one.work.add(make_request("x", [1] * 50, 10))
    one.work.add(make_request("y", [1] * 5, 1))
    assert followed.news(1.0) == []
    one.work.add(make_request("z", [1], 1))
    (news,) = followed.news(2.0, b"b")
    assert news.load == 50 + 10 + 6 + 2 and not news.stored
    started, ended = [Started(0, 0, 0.0)], [Finished(0, "stop")]
    followed.sessions.publish(one.index, CoreOutputs(["x"], [1], None, 0.0, started=started))
    assert followed.news(3.0, b"b")[0].load == 10 + 6 + 2
    followed.sessions.publish(one.index, CoreOutputs(["y"], [1], None, 0.0, finished=ended))
    assert followed.news(4.0, b"b")[0].load == 10 + 2
    followed.sessions.leave(one)
    assert followed.news(5.0, b"b")[0].load == 0
    assert other.work.load == 0


def test_adapters_are_reported_when_they_change(followed: FollowedCore) -> None:
    followed.follow(b"a")
    assert [each.adapters for each in followed.news(0.0)] == [{"sql": "1"}]
    assert followed.news(5.0) == []
    followed.digests["sql"] = "2"
    assert followed.news(5.1) == []  # looked at once a second
    assert followed.news(6.2) == [CacheNews(1, False, b"", b"", 0, adapters={"sql": "2"})]
    followed.follow(b"b")
    assert [each.adapters for each in followed.news(7.0, b"b")] == [{"sql": "2"}]


def test_when_all_have_left_nothing_is_collected(followed: FollowedCore) -> None:
    followed.sessions.leave(followed.follow(b"a"))
    followed.followers.report(0.0)
    assert not followed.kv.cache.followers
    followed.follow(b"a")
    followed.run(0, 1)
    assert len(followed.news(1.0)[0].stored) == 8


def test_a_core_without_a_cache_says_so() -> None:
    followed = FollowedCore()
    followed.core.follow_cache = lambda: None
    followed.follow(b"a")
    (whole,) = followed.news(0.0)
    assert not whole.has_cache and whole.stored == b""
    assert followed.news(1.0) == []
