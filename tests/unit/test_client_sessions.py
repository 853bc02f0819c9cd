"""What a core keeps of its clients, without sockets."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.fake_router import Router, with_requests

from engine.errors import WireError
from engine.messages.requests import CoreOutputs, Finished, TokenLogprobs
from engine.messages.wire import Answer, Dead, Fault, Outputs, Probe
from engine.rpc.sessions import NUM_CREDITS, PROBE_SECONDS, ClientSessions

MAX_BYTES = 5000


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def peers(router: Router, ended: list[str]) -> ClientSessions:
    return ClientSessions(router, ended.extend, max_backlog_bytes=MAX_BYTES)


def batch(*names: str, **details: Any) -> CoreOutputs:
    return CoreOutputs(list(names), [1] * len(names), None, 0.0, **details)


def test_who_cannot_be_reached_has_left(
    peers: ClientSessions, router: Router, ended: list[str]
) -> None:
    with_requests(peers, b"a", "x", "y")
    other = with_requests(peers, b"b", "z")
    router.gone.add(b"a")
    peers.publish(0, batch("x", "y"))
    assert ended == ["x", "y"] and len(peers) == 1 and peers.get(b"b") is other
    peers.publish(0, batch("x"))  # of a step that was under way: nobody is there
    assert not router.batches()


def test_who_has_no_room_now_gets_all_of_it_later_in_order(
    peers: ClientSessions, router: Router
) -> None:
    """A full queue says nothing of whoever is at its end: it may be stopped for a while."""
    peer = with_requests(peers, b"a", "x")
    router.full.add(b"a")
    peers.publish(0, batch("x"))
    peers.send(b"a", Answer(1, "first"))
    peers.send(b"a", Fault("second"))
    peers.tend(0.0)
    with_requests(peers, b"b")  # everybody is probed
    assert peers.get(b"a") is peer and list(peer.live) == ["x"] and peer.queue.num_bytes
    assert peers.has_backlog() and peers.next_look() < PROBE_SECONDS
    router.full.clear()
    peers.tend(1.0)
    sent = [message for identity, message in router.sent if identity == b"a"]
    assert sent[:2] == [Answer(1, "first"), Fault("second")] and isinstance(sent[2], Outputs)
    assert not peer.queue.num_bytes and not peers.has_backlog()
    assert peer.queue.credits == NUM_CREDITS - 1


def test_who_reads_no_answer_is_parted_with_and_told_so(
    peers: ClientSessions, router: Router, ended: list[str], caplog: pytest.LogCaptureFixture
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
    assert isinstance(dead, Dead) and "disconnected it" in dead.message
    peers.tend(9.0)
    assert len(router.sent) == 1


def test_somebody_looks_after_those_who_have_work_here_once_a_second(
    peers: ClientSessions, router: Router, ended: list[str]
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


def test_the_dead_do_not_count_among_those_who_are_there(router: Router, ended: list[str]) -> None:
    peers = ClientSessions(router, ended.extend, max_clients=2)
    with_requests(peers, b"a")
    with_requests(peers, b"b")
    with pytest.raises(WireError, match="2 clients are connected already"):
        peers.welcome(b"c", "")
    router.gone.add(b"a")
    peers.welcome(b"c", "")
    assert {peer.identity for peer in peers} == {b"b", b"c"}


def test_who_comes_back_under_the_same_name_starts_anew(
    peers: ClientSessions, ended: list[str]
) -> None:
    with_requests(peers, b"a", "x")
    peer = with_requests(peers, b"a", "y")
    assert ended == ["x"] and list(peers) == [peer] and peer.index == 1


def test_last_words_reach_all_others_when_one_has_gone(router: Router) -> None:
    """The core is dead by then: it cannot be asked to abort what the gone one had."""

    def dead(ids: list[str]) -> None:
        raise AssertionError("the dead core was asked")

    peers = ClientSessions(router, dead)
    for identity in (b"a", b"b", b"c"):
        with_requests(peers, identity, "x")
    router.sent.clear()
    router.gone.add(b"a")
    router.full.add(b"b")
    peers.broadcast(Dead("why \udc80", "trace\ud800back"))
    assert router.sent == [(b"c", Dead("why \\udc80", "trace\\ud800back"))]


def test_credits_are_spent_returned_and_never_more_than_there_were(
    peers: ClientSessions, router: Router
) -> None:
    peer = with_requests(peers, b"a", "x")
    peer.queue.credits = 2
    for _ in range(5):
        peers.publish(0, batch("x"))
    assert len(router.sent) == 2 and len(peer.queue) == 3 and peers.has_backlog()
    peers.grant(peer, 2)
    assert len(router.sent) == 4 and peer.queue.credits == 0
    peers.grant(peer, 10**9)
    assert len(router.sent) == 5 and peer.queue.credits == NUM_CREDITS - 1
    assert peer.queue.num_bytes == 0 and not peers.has_backlog()


def told_by(router: Router) -> tuple[dict[str, int], dict[str, Finished]]:
    """Number of tokens and end, by request."""
    tokens, ends = {}, {}
    for sent in router.batches():
        counts = sent.counts or [1] * len(sent.request_ids)
        tokens.update(zip(sent.request_ids, counts, strict=True))
        ends.update((sent.request_ids[end.index], end) for end in sent.finished)
    return tokens, ends


def test_an_end_is_forgotten_also_when_it_waits_for_a_credit(peers: ClientSessions) -> None:
    peer = with_requests(peers, b"a", "x", "y")
    peer.queue.credits = 0
    peers.publish(0, batch("x", "y", finished=[Finished(1, "length")]))
    assert list(peer.live) == ["x"]


def test_outputs_too_large_to_travel_fail_who_wanted_them_alone(
    router: Router, ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    peers = ClientSessions(router, ended.extend, max_message_bytes=2000)
    peer = with_requests(peers, b"a", "small", "large", "done")
    large = TokenLogprobs(list(range(500)), [-1.0] * 500, 1)
    with caplog.at_level(logging.WARNING):
        peers.publish(
            0,
            batch(
                "small", "large", "done", finished=[Finished(2, "length")], logprobs={1: [large]}
            ),
        )
    tokens, ends = told_by(router)
    assert tokens == {"small": 1, "large": 0, "done": 1}
    assert {name: end.reason for name, end in ends.items()} == {"done": "length", "large": "error"}
    assert "the limit is 2000" in ends["large"].message
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
    end: Finished, peers: ClientSessions, router: Router, ended: list[str]
) -> None:
    peer = with_requests(peers, b"a", "good", "bad", "done")
    peers.publish(0, batch("good", "bad", "done", finished=[end, Finished(2, "length")]))
    tokens, ends = told_by(router)
    assert tokens == {"good": 1, "bad": 0, "done": 1} and list(peer.live) == ["good"]
    assert {name: end.reason for name, end in ends.items()} == {"done": "length", "bad": "error"}
    assert "cannot be sent to another process" in ends["bad"].message


@pytest.mark.parametrize("credits", [NUM_CREDITS, 0], ids=["of one step", "of a slow reader"])
def test_ends_that_are_too_large_together_are_told_in_several_messages(
    credits: int, router: Router, ended: list[str]
) -> None:
    peers = ClientSessions(router, ended.extend, max_backlog_bytes=20_000, max_message_bytes=2000)
    peer = with_requests(peers, b"a", *"abcde", "running")
    peer.queue.credits = credits
    ends = [Finished(i, "stop", kv_transfer_params={"handle": "x" * 900}) for i in range(5)]
    peers.publish(0, batch(*"abcde", finished=ends))
    while not credits and not ended:
        peers.publish(0, batch("running"))
    peers.grant(peer, NUM_CREDITS)
    _, told = told_by(router)
    handles = [told[name].kv_transfer_params for name in "abcde"]
    assert handles == [{"handle": "x" * 900}] * 5
    assert len(router.batches()) > 2 and not len(peer.queue)


def test_who_reads_no_end_of_very_many_is_parted_with(
    peers: ClientSessions, router: Router, ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    peer = with_requests(peers, b"a", "running")
    peer.queue.credits = 0
    with caplog.at_level(logging.WARNING):
        for i in range(1000):
            if peers.get(b"a") is None:
                break
            peer.live[f"r{i}"] = ()
            end = Finished(0, "length")
            peers.publish(0, CoreOutputs([f"r{i}"], [], [0], 0.0, finished=[end]))
    assert peers.get(b"a") is None and ended == ["running"]
    peers.tend(0.0)
    (last,) = [message for _, message in router.sent if isinstance(message, Dead)]
    assert "bytes of ends waited for client 0 (a) to read them" in last.message


def test_who_does_not_read_is_told_of_each_end_once_and_what_it_was(
    peers: ClientSessions, router: Router, ended: list[str]
) -> None:
    """Ends that stood in what is dropped are kept; who lost tokens was aborted."""
    peer = with_requests(peers, b"a", "lost", "late", "running")
    peer.queue.credits = 0
    peers.publish(0, batch("lost", "running", finished=[Finished(0, "length")]))
    late = CoreOutputs(["late"], [], [0], 0.0, finished=[Finished(0, "deadline", message="late")])
    peers.publish(0, late)
    while not ended:
        peers.publish(0, batch("running"))
    assert ended == ["running"] and not peer.live and len(peer.queue) == 1
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
    assert last.token_ids == [] and len(set(last.request_ids)) == 3 and not peer.queue.num_bytes


def test_an_id_that_is_used_again_before_its_end_was_read_has_two_ends(
    peers: ClientSessions, router: Router, ended: list[str]
) -> None:
    """What waits is in order, so the first end is the first one's, also if the rest is lost."""
    peer = with_requests(peers, b"a", "x")
    peer.queue.credits = 0
    done = CoreOutputs(["x"], [], [0], 0.0, finished=[Finished(0, "length")])
    peers.publish(0, done)
    peer.live["x"] = ()
    while not ended:
        peers.publish(0, batch("x"))
    peers.grant(peer, 9)
    (last,) = router.batches()
    assert [(last.request_ids[end.index], end.reason) for end in last.finished] == [
        ("x", "length"),
        ("x", "abort"),
    ]


def test_a_name_is_shown_on_one_line(peers: ClientSessions) -> None:
    peer = peers.welcome(b"a", "evil\nCRITICAL: \x1b[31m" + "x" * 500)
    assert str(peer) == "client 0 (evil?CRITICAL: ?[31m" + "x" * 60 + ")"
    assert str(peers.welcome(b"b", "")) == "client 1"
