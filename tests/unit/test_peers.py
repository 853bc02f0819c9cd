"""What a core keeps of its clients, without sockets."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import zmq

from engine.core.outbox import FRAME_BYTES, NUM_CREDITS
from engine.core.peers import PROBE_SECONDS, Peer, Peers
from engine.errors import WireError
from engine.ipc.codec import Decoder
from engine.messages.outputs import CoreOutputs, Finished, TokenLogprobs
from engine.messages.wire import Answer, Dead, Fault, Outputs, Probe, ToClient

MAX_BYTES = 5000


class Router:
    """Takes what is sent; clients in ``gone`` cannot be reached, those in ``full`` do not read."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.gone: set[bytes] = set()
        self.full: set[bytes] = set()
        self._decoder: Decoder[Any] = Decoder(ToClient)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if frames[0] in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if frames[0] in self.full:
            raise zmq.Again
        self.sent.append((frames[0], self._decoder.decode(frames[1:])))

    def batches(self) -> list[CoreOutputs]:
        return [message.batch for _, message in self.sent if isinstance(message, Outputs)]


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def peers(router: Router, ended: list[str]) -> Peers:
    return Peers(router, ended.extend, max_backlog_bytes=MAX_BYTES)


def with_requests(peers: Peers, identity: bytes, *names: str) -> Peer:
    peer = peers.welcome(identity, identity.decode())
    peer.live.update(dict.fromkeys(names, ()))
    return peer


def batch(*names: str, **details: Any) -> CoreOutputs:
    return CoreOutputs(list(names), [1] * len(names), None, 0.0, **details)


def test_who_cannot_be_reached_has_left(peers: Peers, router: Router, ended: list[str]) -> None:
    with_requests(peers, b"a", "x", "y")
    other = with_requests(peers, b"b", "z")
    router.gone.add(b"a")
    peers.publish(0, batch("x", "y"))
    assert ended == ["x", "y"] and len(peers) == 1 and peers.get(b"b") is other
    peers.publish(0, batch("x"))  # of a step that was under way: nobody is there
    assert not router.batches()


def test_who_has_no_room_now_gets_all_of_it_later_in_order(peers: Peers, router: Router) -> None:
    """A full queue says nothing of whoever is at its end: it may be stopped for a while."""
    peer = with_requests(peers, b"a", "x")
    router.full.add(b"a")
    peers.publish(0, batch("x"))
    peers.send(b"a", Answer(1, "first"))
    peers.send(b"a", Fault("second"))
    peers.tend(0.0)
    with_requests(peers, b"b")  # everybody is probed
    assert peers.get(b"a") is peer and list(peer.live) == ["x"] and peer.outbox.num_bytes
    assert peers.has_backlog() and peers.next_look() < PROBE_SECONDS
    router.full.clear()
    peers.tend(1.0)
    sent = [message for identity, message in router.sent if identity == b"a"]
    assert sent[:2] == [Answer(1, "first"), Fault("second")] and isinstance(sent[2], Outputs)
    assert not peer.outbox.num_bytes and not peers.has_backlog()
    assert peer.outbox.credits == NUM_CREDITS - 1


def test_who_reads_no_answer_is_parted_with_and_told_so(
    peers: Peers, router: Router, ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with_requests(peers, b"a", "x")
    router.full.add(b"a")
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            peers.send(b"a", Answer(number, "x" * 400))
    assert ended == ["x"] and not len(peers) and "bytes of answers waited" in caplog.text
    peers.tend(1.0)
    assert peers.next_look() < 2.0
    router.full.clear()
    peers.tend(2.0)
    ((_, dead),) = router.sent
    assert isinstance(dead, Dead) and "has parted with it" in dead.message
    peers.tend(9.0)
    assert len(router.sent) == 1


def test_somebody_looks_after_those_who_have_work_here_once_a_second(
    peers: Peers, router: Router, ended: list[str]
) -> None:
    """A client without credits, or whose prompt is long, is sent nothing else for a while."""
    busy = with_requests(peers, b"a", "x")
    idle = with_requests(peers, b"b")
    peers.tend(100.0)
    assert router.sent[-1] == (b"a", Probe()) and peers.next_look() == 100.0 + PROBE_SECONDS
    router.gone |= {b"a", b"b"}
    peers.tend(100.5)
    assert not ended
    peers.tend(101.0)
    assert ended == ["x"] and peers.get(b"a") is None is not busy
    assert peers.get(b"b") is idle and peers.next_look() == float("inf")  # nobody need wake up


def test_the_dead_do_not_count_among_those_who_are_there(
    peers: Peers, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.peers.MAX_CONNECTIONS", 2)
    with_requests(peers, b"a")
    with_requests(peers, b"b")
    with pytest.raises(WireError, match="2 clients are there already"):
        peers.welcome(b"c", "")
    router.gone.add(b"a")
    peers.welcome(b"c", "")
    assert {peer.identity for peer in peers} == {b"b", b"c"}


def test_who_comes_back_under_the_same_name_starts_anew(peers: Peers, ended: list[str]) -> None:
    with_requests(peers, b"a", "x")
    peer = with_requests(peers, b"a", "y")
    assert ended == ["x"] and list(peers) == [peer] and peer.index == 1


def test_last_words_reach_all_others_when_one_has_gone(router: Router) -> None:
    """The core is dead by then: it cannot be asked to abort what the gone one had."""

    def dead(ids: list[str]) -> None:
        raise AssertionError("the dead core was asked")

    peers = Peers(router, dead)
    for identity in (b"a", b"b", b"c"):
        with_requests(peers, identity, "x")
    router.sent.clear()
    router.gone.add(b"a")
    router.full.add(b"b")
    peers.broadcast(Dead("why \udc80", "trace\ud800back"))
    assert router.sent == [(b"c", Dead("why \\udc80", "trace\\ud800back"))]


def test_a_newcomer_makes_the_vanished_be_forgotten(
    peers: Peers, router: Router, ended: list[str]
) -> None:
    with_requests(peers, b"a", "x")
    router.gone.add(b"a")
    with_requests(peers, b"b")
    assert ended == ["x"] and [peer.index for peer in peers] == [1]


def test_credits_are_spent_returned_and_never_more_than_there_were(
    peers: Peers, router: Router
) -> None:
    peer = with_requests(peers, b"a", "x")
    peer.outbox.credits = 2
    for _ in range(5):
        peers.publish(0, batch("x"))
    assert len(router.sent) == 2 and len(peer.outbox) == 3 and peers.has_backlog()
    peers.grant(peer, 2)
    assert len(router.sent) == 4 and peer.outbox.credits == 0
    peers.grant(peer, 10**9)
    assert len(router.sent) == 5 and peer.outbox.credits == NUM_CREDITS - 1
    assert peer.outbox.num_bytes == 0 and not peers.has_backlog()


def test_an_end_is_forgotten_also_when_it_waits_for_a_credit(peers: Peers) -> None:
    peer = with_requests(peers, b"a", "x", "y")
    peer.outbox.credits = 0
    peers.publish(0, batch("x", "y", finished=[Finished(1, "length")]))
    assert list(peer.live) == ["x"]


def test_outputs_too_large_to_travel_fail_who_wanted_them_alone(
    peers: Peers,
    router: Router,
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("engine.ipc.codec.MAX_MESSAGE_BYTES", 2000)
    peer = with_requests(peers, b"a", "small", "large", "done")
    large = TokenLogprobs(list(range(500)), [-1.0] * 500, 1)
    with caplog.at_level(logging.WARNING):
        peers.publish(
            0,
            batch(
                "small", "large", "done", finished=[Finished(2, "length")], logprobs={1: [large]}
            ),
        )
    ((_, outputs),) = router.sent
    assert isinstance(outputs, Outputs) and outputs.batch.request_ids == ["small", "done", "large"]
    assert (outputs.batch.token_ids, outputs.batch.counts) == ([1, 1], [1, 1, 0])
    reasons = {outputs.batch.request_ids[e.index]: e.reason for e in outputs.batch.finished}
    assert reasons == {"done": "length", "large": "error"}
    assert "the limit is 2000" in outputs.batch.finished[-1].message
    assert ended == ["large"] and list(peer.live) == ["small"]


@pytest.mark.parametrize(
    "end",
    [
        Finished(1, "stop", kv_transfer_params={"handle": object()}),
        Finished(1, "error", message="no such file: \udcff"),
        Finished(1, "stop", waits={"policy": object()}),  # type: ignore[dict-item]
        Finished(1, "stop", events=[("seen", object())]),  # type: ignore[list-item]
    ],
    ids=["params", "message", "waits", "events"],
)
def test_an_end_that_cannot_travel_is_an_error_of_that_request_alone(
    end: Finished, peers: Peers, router: Router, ended: list[str]
) -> None:
    peer = with_requests(peers, b"a", "good", "bad", "done")
    stats: Any = object()
    peers.publish(
        0, batch("good", "bad", "done", finished=[end, Finished(2, "length")], stats=stats)
    )
    (sent,) = router.batches()
    reasons = {sent.request_ids[e.index]: e.reason for e in sent.finished}
    assert reasons == {"done": "length", "bad": "error"} and list(peer.live) == ["good"]
    assert "cannot travel to another process" in sent.finished[-1].message
    assert sent.request_ids == ["good", "done", "bad"] and sent.token_ids == [1, 1]


def test_who_does_not_read_is_told_of_each_end_once_and_what_it_was(
    peers: Peers, router: Router, ended: list[str]
) -> None:
    """Ends that stood in what is dropped are kept; who lost tokens was aborted."""
    peer = with_requests(peers, b"a", "lost", "late", "running")
    peer.outbox.credits = 0
    peers.publish(0, batch("lost", "running", finished=[Finished(0, "length")]))
    late = CoreOutputs(["late"], [], [0], 0.0, finished=[Finished(0, "deadline", message="late")])
    peers.publish(0, late)
    while not ended:
        peers.publish(0, batch("running"))
    assert ended == ["running"] and not peer.live and len(peer.outbox) == 1
    peers.grant(peer, 1)
    (last,) = router.batches()
    ends = {last.request_ids[e.index]: (e.reason, e.message[:4]) for e in last.finished}
    waited = str(MAX_BYTES // 1000)
    assert ends.pop("late") == ("deadline", "late")
    assert {name: reason for name, (reason, _) in ends.items()} == {
        "lost": "abort",
        "running": "abort",
    }
    assert all(message[0] == waited for _, message in ends.values())
    assert last.token_ids == [] and len(set(last.request_ids)) == 3 and not peer.outbox.num_bytes


def test_nothing_of_what_a_client_forgot_follows(peers: Peers, router: Router) -> None:
    peer = with_requests(peers, b"a", "x", "y", "z")
    peer.outbox.credits = 0
    peers.publish(0, batch("x", "y", "z", finished=[Finished(2, "length")]))
    peers.publish(0, batch("x"))
    assert peer.outbox.forget(["x", "z", "none"]) == {"z": Finished(2, "length")}
    peers.publish(0, batch("x", "y"))  # another of this name
    peers.grant(peer, 9)
    told = [(sent.request_ids, sent.token_ids, sent.finished) for sent in router.batches()]
    assert told == [(["y"], [1], []), (["x", "y"], [1, 1], [])]
    assert peer.outbox.credits == 7 and not peer.outbox.num_bytes and not peer.outbox.unread


class Life:
    """A client that reads when it likes, and what it makes of what it is sent."""

    def __init__(self, router: Router, dice: random.Random) -> None:
        self.peers = Peers(router, lambda ids: None, max_backlog_bytes=20 * FRAME_BYTES)
        self.peer = with_requests(self.peers, b"a")
        self.ends: dict[str, str] = {}
        """What it was told, by request."""
        self.num_made: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self._num_read: dict[str, int] = {}
        self._router = router
        self._dice = dice

    def act(self) -> None:
        self._router.full = {b"a"} if self._dice.random() < 0.2 else set()
        self._dice.choice([self.step, self.step, self.step, self.submit, self.abort, self.read])()

    def submit(self) -> None:
        name = f"r{len(self.num_made)}"
        self.peer.live[name] = ()
        self.num_made[name] = 0

    def step(self) -> None:
        rows = [name for name in self.peer.live if self._dice.random() < 0.7]
        counts = [self._dice.randint(0, 2) for _ in rows]
        ends = [Finished(row, "length") for row in range(len(rows)) if self._dice.random() < 0.15]
        self._publish(rows, counts, ends)

    def abort(self) -> None:
        self._read_sent()  # which is before the answer
        names = [n for n in self.num_made if n not in self.ends and self._dice.random() < 0.2]
        unread = self.peer.outbox.forget(names)
        assert not unread.keys() & self.peer.live.keys()
        for name in unread.keys() | (self.peer.live.keys() & set(names)):
            self.ends[name] = "abort"
            self.peer.live.pop(name, None)

    def read(self) -> None:
        self._read_sent()
        self.peers.grant(self.peer, self._dice.randint(1, 3))

    def finish(self) -> None:
        self._router.full.clear()
        rows = list(self.peer.live)
        self._publish(rows, [0] * len(rows), [Finished(row, "stop") for row in range(len(rows))])
        while len(self.peer.outbox) or self._router.sent:
            self.read()

    def check_ends(self) -> None:
        assert self.ends.keys() == self.num_made.keys() and not self.peer.live
        for name, reason in self.ends.items():
            assert reason in ("abort", self._reasons.get(name)), name
            if reason != "abort":
                assert self._num_read[name] == self.num_made[name], f"{name} lost tokens unsaid"

    def _publish(self, rows: list[str], counts: list[int], ends: list[Finished]) -> None:
        for name, count in zip(rows, counts, strict=True):
            self.num_made[name] += count
        self._reasons.update((rows[end.index], end.reason) for end in ends)
        if rows:
            tokens = [1] * sum(counts)
            self.peers.publish(0, CoreOutputs(rows, tokens, counts, 0.0, finished=ends))

    def _read_sent(self) -> None:
        for each in self._router.batches():
            self._take(each)
        self._router.sent.clear()

    def _take(self, sent: CoreOutputs) -> None:
        counts = sent.counts or [1] * len(sent.request_ids)
        assert len(set(sent.request_ids)) == len(counts) and sum(counts) == len(sent.token_ids)
        for name, count in zip(sent.request_ids, counts, strict=True):
            assert name not in self.ends, f"{name}: rows behind its end"
            self._num_read[name] = self._num_read.get(name, 0) + count
        self.ends.update((sent.request_ids[end.index], end.reason) for end in sent.finished)


@pytest.mark.parametrize("turn", range(20))
def test_each_request_ends_once_whatever_is_read_when(turn: int, router: Router, seed: int) -> None:
    """Steps, credits, full queues and aborts; only who was aborted may lack tokens."""
    dice = random.Random(seed + turn)
    life = Life(router, dice)
    outbox = life.peer.outbox
    for now in range(300):
        life.act()
        life.peers.tend(float(now))
        outbox.credits = min(outbox.credits, dice.randint(0, 5))
        waiting = [*outbox._answers, *(each.frame for each in outbox._batches)]
        assert outbox.num_bytes == sum(len(frame) + FRAME_BYTES for frame in waiting)
    life.finish()
    life.check_ends()
    assert outbox.num_bytes == 0 and not outbox.unread


def test_a_name_is_shown_on_one_line(peers: Peers) -> None:
    peer = peers.welcome(b"a", "evil\nCRITICAL: \x1b[31m" + "x" * 500)
    assert str(peer) == "client 0 (evil?CRITICAL: ?[31m" + "x" * 60 + ")"
    assert str(peers.welcome(b"b", "")) == "client 1"
