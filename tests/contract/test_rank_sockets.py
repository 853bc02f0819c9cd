"""Calls and reports between a core and ranks on other machines, here threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from support.live_core import wait_until
from support.patience import WAIT_SECONDS
from support.processes import open_files

from engine.errors import RankError
from engine.ipc.codec import MAX_MESSAGE_BYTES
from engine.ipc.rank_sockets import RankSocket, RankSockets
from engine.ipc.ring import RingError, Stopped

HOST = "127.0.0.1"
BEAT_SECONDS = 0.05
SECRET = "a secret of more than sixteen characters"


@contextmanager
def connected(num: int = 1, secret: str = SECRET) -> Iterator[tuple[RankSockets, list[RankSocket]]]:
    """A core and its ranks. In the end, the core notices that the first rank is lost."""
    lost: list[int] = []
    ranks = [RankSocket(HOST, SECRET, threading.Event().set, BEAT_SECONDS) for _ in range(num)]
    core = RankSockets([rank.address for rank in ranks], secret, lost.append)
    try:
        if secret == SECRET:
            for rank in ranks:
                rank.accept()
        yield core, ranks
        if secret != SECRET:
            assert wait_until(lambda: lost == [0]) is not None
        else:
            assert not lost
            ranks[0].close()
            assert wait_until(lambda: lost == [0]) is not None
    finally:
        core.close()
        core.close()
        for rank in ranks[1:] if secret == SECRET else ranks:
            rank.close()


def test_all_ranks_receive_calls_of_any_size_in_order() -> None:
    before = open_files()
    with connected(2) as (core, ranks), ThreadPoolExecutor(2) as threads:
        long = b"x" * (MAX_MESSAGE_BYTES + 17)
        sent = [b"", b"one", long, b"two"]
        found: list[Future[list[bytes]]] = [
            threads.submit(lambda rank=rank: [rank.receive() for _ in sent]) for rank in ranks
        ]
        for message in sent:
            core.send(message[:1], message[1:])
        assert all(each.result(WAIT_SECONDS) == sent for each in found)
    assert wait_until(lambda: open_files() <= before) is not None


def test_the_core_sees_words_reports_and_how_far_a_rank_is() -> None:
    with connected() as (core, (rank,)):
        rank.progress = lambda: 41
        core.send(b"a")
        assert rank.receive() == b"a"
        rank.report(3, -5)
        rank.report(0, 1 << 40)
        rank.report(3, 7)
        rank.send_report(b"an error" * 20_000)
        assert (
            core.lines[0].poll(WAIT_SECONDS) and core.lines[0].recv_bytes() == b"an error" * 20_000
        )
        core.send(b"b")
        assert rank.receive() == b"b"  # which shows the words
        assert wait_until(lambda: core.reported(0, 3) == 7) is not None
        assert core.reported(0, 0) == 1 << 40 and core.reported(0, 1) == 0
        assert wait_until(lambda: core.num_begun(0) == 41) is not None
        core.stop()
        with pytest.raises(Stopped):
            core.send(b"c")


def test_a_core_without_the_secret_is_not_heard() -> None:
    with connected(secret=SECRET + "!") as (core, (rank,)):
        core.send(b"shutdown")
        with pytest.raises(RankError, match="has not connected to this rank in 0 s"):
            rank.accept(seconds=0)


def test_a_message_that_is_lost_or_comes_twice_is_found() -> None:
    with connected() as (core, (rank,)):
        core.send(b"a")
        core.num_sent += 1  # as if one had been lost
        core.send(b"b")
        assert rank.receive() == b"a"
        with pytest.raises(RingError, match="message 1 of the core is number 2"):
            rank.receive()


def test_a_rank_notices_that_its_core_is_lost() -> None:
    is_lost = threading.Event()
    rank = RankSocket(HOST, SECRET, is_lost.set, BEAT_SECONDS)
    core = RankSockets([rank.address], SECRET, lambda index: None)
    rank.accept()
    core.close()
    assert is_lost.wait(WAIT_SECONDS)
    rank.close()
